"""Builds the CUDA kernels for several architectures where there is no GPU, and reads what the compiler says."""

from __future__ import annotations

import re

import pytest

from distmm_kernels.config import SUPPORTED
from distmm_kernels.tiling import TILINGS, Access

pytestmark = pytest.mark.compile

ARCHITECTURES = [(8, 0), (9, 0), (12, 0)]


@pytest.fixture(scope="module")
def build():
    """A function from kernel, dtype, architecture and linker's options to PTX and the linker's log."""
    from numba import config, cuda, from_dtype, types

    if config.ENABLE_CUDASIM:
        pytest.skip("the simulator compiles nothing")
    try:
        from cuda.bindings import nvjitlink, nvvm

        nvvm.version()
        nvjitlink.version()
    except Exception as error:  # each library's own error when its file is not there
        pytest.skip(f"the CUDA compiler is not installed: {error}")

    def built(kernel, dtype, architecture, *options):
        stack = types.Array(from_dtype(dtype), 3, "A")
        signature = types.void(stack, stack, stack, stack)
        ptx, _ = cuda.compile(kernel, signature, device=False, cc=architecture, output="ptx", abi="numba")
        options = [f"-arch=sm_{architecture[0]}{architecture[1]}", "-verbose", "-Xptxas=-v", *options]
        handle = nvjitlink.create(len(options), options)
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), kernel.__name__)
            nvjitlink.complete(handle)
            log = bytearray(nvjitlink.get_info_log_size(handle))
            nvjitlink.get_info_log(handle, log)
            assert nvjitlink.get_linked_cubin_size(handle) > 0
        finally:
            nvjitlink.destroy(handle)
        return ptx, log.decode()

    return built


def source_of(name):
    # late, since these modules import numba.cuda
    from distmm_kernels.gemm.naive import naive
    from distmm_kernels.gemm.tiled import tiled

    return {"naive": naive, "tiled": tiled}[name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("kernel", ["naive", "tiled"])
def test_kernels_build_without_spills_and_fit_a_block_of_1024_threads(build, kernel, dtype, architecture):
    ptx, log = build(source_of(kernel)(dtype, 32), dtype, architecture)
    assert ".local" not in ptx
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", log)))
    assert 0 < registers <= 64, "65536 registers / 1024 threads"


def register_tiled_of(dtype, axis_a, axis_b, wide):
    from distmm_kernels.gemm.register_tiled import register_tiled

    tiling = TILINGS[dtype.name]
    width = tiling.vector if wide else 1
    return register_tiled(dtype, tiling, Access(axis_a, width), Access(axis_b, width), width)


# C and Fortran order, and the mixture with the most addresses to hold; architectures differ little, so one has them all
@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize(
    ("architecture", "axis_a", "axis_b", "wide"),
    [
        ((9, 0), 1, 1, True),
        ((9, 0), 0, 0, True),
        ((9, 0), 0, 1, True),
        ((9, 0), 0, 0, False),
        ((9, 0), 1, 0, False),
        ((8, 0), 1, 1, True),
        ((12, 0), 1, 1, True),
    ],
)
def test_register_tiles_stay_in_registers(build, dtype, architecture, axis_a, axis_b, wide):
    tiling = TILINGS[dtype.name]
    most = min(255, 65536 // (tiling.threads * tiling.blocks))
    kernel = register_tiled_of(dtype, axis_a, axis_b, wide)
    ptx, log = build(kernel, dtype, architecture, f"-maxrregcount={most}")
    assert ".local" not in ptx
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert max(map(int, re.findall(r"[Uu]sed (\d+) registers", log))) <= most


@pytest.mark.parametrize("dtype", [dtype for dtype in SUPPORTED if dtype.kind in "fc"])
def test_every_product_of_register_tiles_is_one_fused_step(build, dtype):
    ptx, _ = build(register_tiled_of(dtype, 1, 1, True), dtype, (9, 0))
    tiling = TILINGS[dtype.name]
    steps = tiling.thread_rows * tiling.thread_columns * tiling.depth * (4 if dtype.kind == "c" else 1)
    assert len(re.findall(r"fma\.rn\.f(32|64)", ptx)) == steps
    assert not re.search(r"(add|sub|mul|mad)(\.rn)?\.f(32|64)", ptx)
    assert re.search(r"ld\.shared\.v[24]\.", ptx)
    assert re.search(r"ld\.global\.v[24]\.", ptx)


@pytest.mark.parametrize("dtype", [dtype for dtype in SUPPORTED if dtype.kind in "fc"])
def test_floating_point_steps_are_fused_and_nothing_else(build, dtype):
    ptx, _ = build(source_of("tiled")(dtype, 32), dtype, (9, 0))
    chain = r"fma\.rn\.f(32|64)"
    assert len(re.findall(chain, ptx)) >= (4 if dtype.kind == "c" else 1)
    assert not re.search(r"(add|sub|mul|mad)(\.rn)?\.f(32|64)", ptx)


def test_int32_steps_stay_in_32_bits(build):
    ptx, _ = build(source_of("tiled")(SUPPORTED[2], 32), SUPPORTED[2], (9, 0))
    assert SUPPORTED[2] == "int32"
    assert len(re.findall(r"mad\.lo\.s32", ptx)) >= 32
