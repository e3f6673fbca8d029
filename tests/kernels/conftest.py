from __future__ import annotations

import contextlib

import pytest


@pytest.fixture
def ampere(gpu):
    """The same, of compute capability 8.0 or more."""
    if gpu.compute_capability < (8, 0):
        pytest.skip(f"{gpu} has no asynchronous copies to shared memory")
    return gpu


@pytest.fixture
def hopper(gpu):
    """The same, of compute capability 9.0."""
    if gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu} has no wgmma")
    return gpu


@pytest.fixture
def live_memory(gpu):
    """A context in which CuPy's allocations are counted: bytes that are live ``now``, and the ``peak`` of them."""
    import cupy

    class Live(cupy.cuda.MemoryHook):
        name, now, peak = "live", 0, 0

        def malloc_postprocess(self, **facts):
            self.now += facts["mem_size"]
            self.peak = max(self.peak, self.now)

        def free_postprocess(self, **facts):
            self.now -= facts["mem_size"]

    @contextlib.contextmanager
    def counted():
        live, pool = Live(), cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc), live:
            yield live

    return counted


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
