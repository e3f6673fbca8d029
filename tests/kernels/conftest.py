from __future__ import annotations

import pytest

from distmm_kernels import device


@pytest.fixture
def gpu():
    """The GPU that tests run on; without one the test is skipped and says what is missing."""
    if missing := device.why_no_gpu():
        pytest.skip(missing)
    return device.current()


@pytest.fixture(scope="session")
def cuda_compiler():
    """Skips where kernels cannot be compiled, and says what is missing."""
    from numba import config

    from distmm_kernels.launch import compiler

    if config.ENABLE_CUDASIM:
        pytest.skip("the simulator compiles nothing")
    try:
        compiler.versions()
    except Exception as error:  # each library's own error when its file is not there
        pytest.skip(f"the CUDA compiler is not installed: {error}")
