"""Jobs of the tests write into memory, and their reports are without charts, but for those of `test_job.py`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module", autouse=True)
def charts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Four charts take matplotlib 0.12 s, in each of some hundred jobs; `telemetry/test_report.py` looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        if Path(request.path).name != "test_job.py":
            for name in ("timeline", "lines", "bars"):
                patch.setattr(f"distmm.telemetry.charts.{name}", lambda *_: "<svg/>")
        yield
