"""`kernel_peers.py`: its names, and on a GPU a row for each product."""

from __future__ import annotations

import json
from pathlib import Path

import kernel_peers
import pytest


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernel_peers.main(["squares"])
    assert f"no squares: there are {', '.join(kernel_peers.NAMES)}" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", kernel_peers.NAMES)
def test_each_contestant_has_seconds_and_joules(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    table = tmp_path / "table.json"
    kernel_peers.main([name, "--size", "512", "--rounds", "1", "--joules", "0.1", "--json", str(table)])
    contestants = [each for row in json.loads(table.read_text()) for each in row["contestants"].values()]
    assert contestants
    assert all(each["seconds"] > 0 and each["joules"] > 0 for each in contestants)
