"""The worked examples are notebooks that run from beginning to end, here at a small size."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "distmm" / "examples"
SMALL = {
    "cosine_similarity": "rows, features, topics, best = 1200, 64, 20, 5",
    "covariance": "rows, features = 4000, 60",
}


def nbclient() -> Any:
    if os.environ.get("DISTMM_CI"):
        import nbclient

        return nbclient
    return pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel (extra test)")


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SMALL)


@pytest.mark.filterwarnings("ignore")  # what Jupyter's own packages warn of is not ours
@pytest.mark.parametrize("name", sorted(SMALL))
def test_examples_run_from_beginning_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = nbclient()
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = f'{SMALL[name]}\nfolder = "data"'
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
