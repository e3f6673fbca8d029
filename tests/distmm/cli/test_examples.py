"""The worked examples are notebooks that run from beginning to end, here at a small size.

Their cells run in this process, and their workers are forked. Jupyter's kernel and two new workers would take most of
the time, and would test nothing more. `telemetry/test_progress.py` has a real kernel.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import forked

EXAMPLES = Path(__file__).resolve().parents[3] / "distmm" / "examples"
SMALL = {
    # Five waves down and across: the blocks of one are a tenth of the similarities.
    "cosine_similarity": 'rows, features, topics, best, plan = 1200, 64, 20, 5, "g2x1x1 b120x64x120 p1 w5 l2"',
    "covariance": "rows, features = 4000, 60",
    "tensor_network": "sites, bond, levels = 4, 12, 2",
    "genomic_relationship": "individuals, markers, families = 160, 3000, 50",
    "randomised_svd": "rows, columns, rank = 1600, 80, 3",
}


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SMALL)


def parameters(cell: dict[str, Any]) -> bool:
    return "parameters" in cell["metadata"].get("tags", ())


@pytest.mark.minutes
@pytest.mark.parametrize("name", sorted(SMALL))
def test_examples_run_from_beginning_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    assert list(map(parameters, cells)).count(True) == 1
    names: dict[str, Any] = {}
    with ExitStack() as left, forked.workers():
        for at, cell in enumerate(cells):
            source = f'{SMALL[name]}\nfolder = "data"' if parameters(cell) else "".join(cell["source"])
            exec(compile(source, f"{name}, cell {at}", "exec"), names)
            if "client" in names:
                left.callback(names["client"].close)
    assert names["client"].status == "closed"
