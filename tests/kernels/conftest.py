from __future__ import annotations

import pytest

from distmm_kernels import device


@pytest.fixture
def gpu():
    """The GPU that tests run on; without one the test is skipped and says what is missing."""
    if missing := device.why_no_gpu():
        pytest.skip(missing)
    return device.current()
