"""Results, markers, reports and certificates have the modes that the umask gives, and the group of their folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import Stopped
from tests.distmm.job import disturbed, reduced
from tests.tables import later

OF_THE_PROJECT = 4711


@pytest.fixture
def umask(request: pytest.FixtureRequest, client: Client) -> Iterator[int]:
    """A user's umask, in the client and in the workers, as a shell or a batch system hands it to both."""
    before, on_workers = os.umask(request.param), client.run(os.umask, request.param)
    try:
        yield request.param
    finally:
        os.umask(before)
        for worker, old in on_workers.items():
            client.run(os.umask, old, workers=[worker])


@pytest.fixture
def shared(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a project: what is made in it is the project's."""
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, -1, OF_THE_PROJECT if os.geteuid() == 0 else os.getgroups()[0])
    folder.chmod(0o2770)
    monkeypatch.chdir(folder)
    return folder


def _wrong(folder: Path, umask: int) -> dict[str, str]:
    """Return what has another mode or group."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        wanted = 0o2777 & ~umask if path.is_dir() else 0o666 & ~umask
        if (stat.S_IMODE(status.st_mode), status.st_gid) != (wanted, folder.stat().st_gid):
            found[str(path.relative_to(folder))] = f"{stat.S_IMODE(status.st_mode):o} of group {status.st_gid}"
    return found


@pytest.mark.parametrize(
    ("umask", "name"), later([(0o002, "C.zarr"), (0o027, "C.npy"), (0o077, "C.h5")]), indirect=["umask"]
)
def test_a_product_belongs_to_those_who_share_its_folder(client: Client, shared: Path, umask: int, name: str) -> None:
    a, b = np.random.default_rng(0).integers(-9, 10, (2, 60, 60)).astype("f8")
    job.multiply(a, b, name, client=client, blocks=(20, 20, 20))
    assert {f"{name}.certificate.json", f"{name}.report.html"} < set(os.listdir("."))
    assert _wrong(shared, umask) == {}


@pytest.mark.parametrize(("umask", "kind"), later([(0o002, "product"), (0o027, "best of rows")]), indirect=["umask"])
def test_what_a_stopped_job_keeps_belongs_to_those_who_may_resume_it(
    client: Client, shared: Path, umask: int, kind: str
) -> None:
    if kind == "product":
        disturbed.operands(shared / "in")
        with pytest.raises(Stopped):
            disturbed.multiply(client, stop=disturbed.HalfWay())
    else:
        reduced.operands(shared)
        with pytest.raises(Stopped):
            reduced.topk(client, stop=reduced.HalfWay())
    assert len(list(shared.rglob("*.json"))) > 2
    assert _wrong(shared, umask) == {}
