"""The current folder of commands, and the cluster that they connect to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from distributed import Client


@pytest.fixture
def where(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that connect to the tests' cluster. The current folder holds A, B and their product P."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((60, 50)).astype("float32"), rng.standard_normal((50, 40)).astype("float32")
    monkeypatch.chdir(tmp_path)
    for name, values in {"A": a, "B": b, "P": a @ b}.items():
        np.save(f"{name}.npy", values)
    return ["--cluster", client.scheduler.address]
