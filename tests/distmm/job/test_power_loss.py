"""Power is lost at any moment of a job: what is on the disk then leads to the right C, once, or to none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

from distmm import job
from distmm.errors import InputError
from distmm.job import planning
from distmm.storage import open_matrix, output
from tests.distmm.job.powerless import Disk
from tests.distmm.storage.samples import save_matrix

# C is two blocks.
BLOCKS, PLAN = (6, 8, 5), "g1x1x1 b6x8x5 p1 w1 l1"
A = np.arange(48.0).reshape(6, 8)
B = np.arange(80.0).reshape(8, 10) % 7 - 3
BEFORE = np.arange(60.0).reshape(6, 10)
LATER = pytest.mark.minutes


@pytest.fixture(scope="module")
def here() -> Iterator[Client]:
    """A cluster in this process, where the model sees each fsync."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def refusal(call: Callable[[], object]) -> str | None:
    """Return what a call is refused with."""
    try:
        call()
    except InputError as error:
        return str(error)
    return None


@pytest.mark.minutes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "before", "options", "atomic", "shared"),
    [
        ("C.zarr", False, {}, True, False),
        ("C.zarr", False, {}, True, True),
        pytest.param("C.npy", False, {}, True, True, marks=LATER),
        pytest.param("C.zarr", True, {"overwrite": True}, True, False, marks=LATER),
        pytest.param("C.zarr", True, {"beta": 1}, True, True, marks=LATER),
        ("C.npy", True, {"beta": 1}, True, False),
        pytest.param("C.zarr", True, {"beta": 1}, False, False, marks=LATER),
    ],
)
def test_after_a_loss_of_power_c_is_right_once_it_is_there(
    out: str, before: bool, options: dict[str, Any], atomic: bool, shared: bool, here: Client, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    path = disk.root / out
    if before:
        save_matrix(path, BEFORE, (4, 4))
    if shared:
        monkeypatch.setattr(planning, "BLOCKS", 1)  # blocks are joined: one task writes several chunks
    if not atomic:
        monkeypatch.setattr(output, "exchange", lambda one, other: False)
    expected = A @ B + (BEFORE if "beta" in options else 0)

    def multiply(**more: Any) -> job.Summary:
        return job.multiply(tmp_path / "A.npy", tmp_path / "B.npy", path, client=here, **{**options, **more})

    def right() -> bool:
        return os.path.lexists(path) and bool((open_matrix(path)[...] == expected).all())

    def unchanged() -> bool:
        return bool((open_matrix(path)[...] == BEFORE).all())

    with disk.noted():
        multiply(**({"blocks": BLOCKS} if shared else {"plan": PLAN}))
    assert len(disk.states) > 20
    for name, state in disk.states:
        disk.become(state)
        message = refusal(lambda: job.resume(path, client=here))
        if message is None:
            assert right(), name
            message = refusal(lambda: multiply(overwrite=False))
        else:
            assert "there is no unfinished job" in message, name
            assert right() or (unchanged() if before else not os.path.lexists(path)), name
            message = refusal(multiply)
        assert message is None or "is already the result of the same call" in message, name
        assert right(), name
        assert job.recheck(path).outcome == ("cannot tell" if "beta" in options else "right"), name
        assert not os.path.exists(f"{path}.job"), name


@pytest.mark.minutes
def test_after_a_loss_of_power_a_reduced_product_is_right_once_it_is_there(here: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    path, c = disk.root / "out.zarr", A @ B

    def threshold() -> job.Summary:
        return job.threshold(tmp_path / "A.npy", tmp_path / "B.npy", 10, path, client=here, plan=PLAN)

    def right() -> bool:
        return bool((np.asarray(zarr.open_group(path, mode="r")["values"]) == c[c >= 10]).all())

    with disk.noted():
        threshold()
    assert len(disk.states) > 20
    for name, state in disk.states:
        disk.become(state)
        message = refusal(lambda: job.resume(path, client=here))
        assert message is None or "there is no unfinished job" in message, name
        assert message is None or not os.path.lexists(path) or right(), name
        assert refusal(threshold) is None, name
        assert right(), name
        assert job.recheck(path).outcome == "right", name
        assert not os.path.exists(f"{path}.job"), name
