"""Damaged files of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import InputError, Stopped
from tests.distmm.job.disturbed import HalfWay, multiply, operands, values
from tests.tables import later


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.chdir(tmp_path)
    return operands(tmp_path / "in")


@pytest.mark.minutes
def test_blocks_with_damaged_markers_are_made_again(client: Client, product: np.ndarray) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    markers = sorted(Path("C.zarr.job").glob("*/*/done/*.json"))
    first, second = (path.read_text() for path in markers[:2])
    markers[0].write_bytes(b"")
    markers[1].write_text(first)  # of another block
    markers[2].write_text("[1]")
    assert second != first
    assert job.resume("C.zarr", client=client).kept == len(markers) - 3
    np.testing.assert_allclose(values(), product)


@pytest.mark.parametrize(
    "change", later([{"blocks": "all"}, {"output": None}, {"runs": [1]}, {"spec": {}}, {"seed": True}], first=2)
)
def test_a_damaged_manifest_is_refused_and_can_be_replaced(
    change: dict[str, Any], client: Client, product: np.ndarray
) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    manifest = Path("C.zarr.job/manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    for use in (lambda: job.status("C.zarr"), lambda: job.resume("C.zarr", client=client), lambda: multiply(client)):
        with pytest.raises(InputError, match=rf"manifest.json: is damaged.*{next(iter(change))}.*--overwrite"):
            use()


@pytest.mark.minutes
def test_a_damaged_certificate_is_refused(client: Client, product: np.ndarray) -> None:
    multiply(client)
    certificate = Path("C.zarr.certificate.json")
    whole = json.loads(certificate.read_text())
    for content in ("", "[]", "{}", json.dumps({**whole, "done": [{}]}), json.dumps({**whole, "spec": 1})):
        certificate.write_text(content)
        for use in (lambda: job.status("C.zarr"), lambda: job.recheck("C.zarr"), lambda: job.resume("C.zarr")):
            with pytest.raises(InputError, match=r"certificate\.json"):
                use()
