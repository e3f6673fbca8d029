"""Jobs of the tests write their reports without charts, but for those of `test_job.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def charts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Four charts take matplotlib 0.12 s, in each of some hundred jobs; `telemetry/test_report.py` looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        if Path(request.path).name != "test_job.py":
            for name in ("timeline", "lines", "bars"):
                patch.setattr(f"distmm.telemetry.charts.{name}", lambda *_: "<svg/>")
        yield
