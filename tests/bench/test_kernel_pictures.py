"""`kernel_pictures.py` draws what `distmm bench kernels --json` writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from distmm.bench.ladder_report import Report, Row
from distmm_kernels import device
from distmm_kernels.bench import Results, Run
from distmm_kernels.config import Problem
from tests.bench import kernel_pictures


def results(runs: tuple[tuple[str, float], ...] = (("cuBLAS float32", 50.0), ("fp16x3", 210.0))) -> Results:
    found = Results("some GPU", 0, 3, {"python": "3"}, copy_rate=4e12)
    for size in ((512, 512, 512), (8191, 8193, 8190)):
        for name, tflops in runs:
            found.runs.append(
                Run(*size, "float32", "highest", "float32", name, True, "cuBLAS float32", tflops=tflops, burst=tflops,
                    ratio=1.0, burst_ratio=1.0, error=2e-7, worst=1e-6, intensity=size[0] / 6)
            )  # fmt: skip
    return found


def report() -> Report:
    found, problem = Report.of(device.cpu(), 0, 1), Problem(24, 24, 24, np.dtype("float32"))
    found.add(Row.of(problem, order, "NumPy", 1e-3, residual=0.0) for order in "CF")
    return found


def test_both_parts_are_drawn_from_json_as_png_and_svg(tmp_path: Path) -> None:
    facts = {"ladder": dataclasses.asdict(report()), "race": dataclasses.asdict(results())}
    (tmp_path / "bench.json").write_text(json.dumps(facts), encoding="utf-8")
    kernel_pictures.main([str(tmp_path / "bench.json"), str(tmp_path / "kernels.v1")])
    (tmp_path / "bench.json").unlink()
    names = ("kernels.v1.png", "kernels.v1.svg", "kernels.v1-roofline.png", "kernels.v1-roofline.svg")
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    for name in names:
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG") if name.endswith("png") else b"</svg>" in content
    text = (tmp_path / "kernels.v1-roofline.svg").read_text()
    for label in ("<!-- fp16x3 -->", "<!-- 512 -->", "<!-- 8191x8193x8190 -->"):  # the sizes, too
        assert label in text


def test_nothing_measured_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows to draw"):
        kernel_pictures.ladder(Report.of(device.cpu(), 0, 1), tmp_path / "empty")
    with pytest.raises(ValueError, match="no runs to draw"):
        kernel_pictures.roofline(results(()), tmp_path / "empty")
