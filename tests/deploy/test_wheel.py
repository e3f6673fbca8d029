"""The wheel: the same bytes each time, and with the examples that the command line hands out."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="building a wheel needs hatchling, of the extra test")

ROOT = Path(__file__).parents[2]
SOURCES = {
    "notebooks": ROOT / "distmm/examples",
    **{kind: ROOT / "deploy" / kind for kind in ("slurm", "kubernetes", "monitoring")},
}


def build(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_the_same_source_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    assert build(tmp_path).read_bytes() == wheel.read_bytes()


def test_an_installed_distmm_writes_the_examples_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "distmm", "examples", "--write", "mine"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(tmp_path / "mine"): path for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    for kind, source in SOURCES.items():
        names = {path.name for path in source.iterdir() if path.is_file() and path.suffix != ".md"}
        assert {path.name for path in written if path.parts[0] == kind} == names
        for name in names:
            assert written[Path(kind) / name].read_bytes() == (source / name).read_bytes()
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.strip()) == (
        2, "error: mine/notebooks/cosine_similarity.ipynb: exists already; give another folder, or remove it first",
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [["monitoring"], ["slurm", "notebooks"]])
def test_some_kinds_of_examples_are_written_alone(kinds: list[str], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from distmm.cli.app import app

    done = CliRunner().invoke(app, ["examples", *kinds, "--write", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == sorted(kinds)
