"""Jobs of the tests write into memory."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from tests.distmm.job.object_server import served

MEMORY, ROOM = Path("/dev/shm"), 1 << 30


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is a gigabyte: a small job syncs a hundred times, for milliseconds on a disk.

    On a disk nobody would see what is synced before what either: `test_power_loss.py` has a model of that.
    """
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="distmm-job-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def s3(client: Client) -> Iterator[None]:
    """An S3 server with one bucket, for this process, its children, and the workers."""
    for package in ("moto.server", "s3fs"):
        pytest.importorskip(package, reason="an S3 server needs moto and s3fs, of the extra test")
    with served(client):
        yield


@pytest.fixture
def stored(s3: None) -> str:
    """Name of an array in its bucket that no other test has."""
    return f"{uuid.uuid4().hex[:8]}/C.zarr"
