"""Builds the CUDA kernels for several architectures where there is no GPU, and reads what the compiler says."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from distmm_kernels.config import SUPPORTED
from distmm_kernels.tiles.fragment_tiles import tilings as fragment_tilings
from distmm_kernels.tiles.mma_tiles import tilings
from distmm_kernels.tiles.tiling import TILINGS

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

    def built(kernel, dtype, architecture, *options, signature=None):
        if signature is None:
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


@pytest.fixture(scope="module")
def register_tiles(build):
    """A function from dtype, tiling, vectors or not, and architecture to the linker's log; its cubins are not kept."""
    from distmm_kernels.device_code.register_tiled import source
    from distmm_kernels.launch import compiler

    def built(dtype, tiling, wide, architecture):
        return compiler.build(source(dtype, tiling, tiling.vector if wide else 1), architecture).log

    return built


# every tiling for one architecture, and the large ones for the others: they differ little
@pytest.mark.parametrize(
    ("dtype", "size", "wide", "architecture"),
    [
        *((dtype, size, True, (9, 0)) for dtype in TILINGS for size in (0, 1)),
        *((dtype, 0, False, (9, 0)) for dtype in TILINGS),
        *((dtype, 0, True, architecture) for dtype in TILINGS for architecture in ((8, 0), (12, 0))),
    ],
)
def test_register_tiles_stay_in_registers(register_tiles, dtype, size, wide, architecture):
    tiling = TILINGS[dtype][size]
    log = register_tiles(dtype, tiling, wide, architecture)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(
    ("along_k", "architecture"),
    [
        *((along_k, (9, 0)) for along_k in itertools.product((False, True), repeat=2)),
        *(((True, False), architecture) for architecture in ((8, 0), (8, 6), (10, 0), (12, 0))),
    ],
)
@pytest.mark.usefixtures("build")  # skips where the compiler is missing
def test_tiles_of_a_warps_instructions_stay_in_registers(along_k, architecture, size, wide):
    from distmm_kernels.device_code.mma import source
    from distmm_kernels.launch import compiler

    tiling = dataclasses.replace(tilings(architecture)[size], along_k=along_k)
    made = compiler.build(source("float64", tiling, tiling.vector if wide else 1), architecture)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", made.log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"
    assert made.shared_bytes in (0, tiling.shared_bytes)


def test_every_product_of_a_warps_instructions_is_one_on_tensor_cores(build):
    from distmm_kernels.device_code.mma import multiply
    from distmm_kernels.device_code.register_tiled import register_tiled

    dtype = np.dtype("float64")
    for architecture, steps in (((8, 0), 8), ((9, 0), 16)):
        tiling = dataclasses.replace(tilings(architecture)[0], along_k=(True, False))
        ptx, _ = build(register_tiled(dtype, tiling, tiling.vector, multiply), dtype, architecture)
        each = tiling.thread_rows * tiling.thread_columns * tiling.depth // steps
        assert len(re.findall(rf"mma\.sync\.aligned\.m{steps}n8k4\.row\.col\.f64", ptx)) == each
        assert not re.search(r"(fma|add|sub|mul|mad)(\.rn)?\.f64", ptx)
        assert re.search(r"st\.global\.v2\.", ptx)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(
    ("operand", "along_k", "architecture"),
    [
        *(("bfloat16", way, (9, 0)) for way in itertools.product((False, True), repeat=2)),
        *((operand, (True, True), (9, 0)) for operand in ("float16", "int8", "tfloat32")),
        *((operand, (True, True), gpu) for operand in ("int8", "tfloat32") for gpu in ((8, 6), (12, 0))),
        *(("bfloat16", (True, False), gpu) for gpu in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))),
    ],
)
@pytest.mark.usefixtures("build")  # skips where the compiler is missing
def test_fragments_stay_in_registers(operand, along_k, architecture, size, wide):
    from distmm_kernels.device_code.fragments import source
    from distmm_kernels.launch import compiler

    tiling = dataclasses.replace(fragment_tilings(operand, architecture)[size], along_k=along_k)
    made = compiler.build(source(operand, tiling, tiling.widest if wide else 1), architecture)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", made.log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"
    assert made.shared_bytes in (0, tiling.shared_bytes)


@pytest.mark.parametrize(
    ("operand", "instruction", "reads"),
    [
        ("bfloat16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", [".trans", ""]),
        ("float16", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", [".trans", ""]),
        ("int8", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", ["", ""]),
        ("tfloat32", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", ["", ""]),
    ],
)
def test_fragments_are_read_by_ldmatrix_and_multiplied_by_tensor_cores(build, operand, instruction, reads):
    from distmm_kernels.device_code.fragments import source

    tiling = fragment_tilings(operand, (9, 0))[0]
    tiling = dataclasses.replace(tiling, along_k=tuple(not turned for turned in reads))
    made = source(operand, tiling, tiling.widest)
    ptx, _ = build(made.function, operand, (9, 0), "-maxrregcount=255", signature=made.signature)
    steps = tiling.depth // tiling.step
    assert ptx.count(f"{instruction} ") == steps * (tiling.part[0] // 16) * (tiling.part[1] // 8)
    expected = {".trans": 0, "": 0}
    for turned, edge in zip(reads, tiling.part, strict=True):
        expected[turned] += (steps + 1) * edge // 16  # and once before the loop
    for turned, count in expected.items():
        assert ptx.count(f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 ") == count
    assert "cp.async.cg.shared.global" in ptx
    assert "st.global.v2." in ptx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "copy",
    ["transposing uint16", "transposing complex128", "transposing words of 2", "transposing words of 4", "realigning"],
)
@pytest.mark.usefixtures("build")  # skips where the compiler is missing
def test_copies_stay_in_registers(copy, architecture):
    from distmm_kernels.device_code.copies import realign, transpose, transpose_words
    from distmm_kernels.launch import compiler

    if copy == "realigning":
        source = realign.source()
    elif "words" in copy:
        source = transpose_words.source(int(copy[-1]))
    else:
        source = transpose.source(copy[12:])
    log = compiler.build(source, architecture).log
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.parametrize("dtype", [dtype for dtype in SUPPORTED if dtype.kind in "fc"])
def test_every_product_of_register_tiles_is_one_fused_step(build, dtype):
    from distmm_kernels.device_code.register_tiled import register_tiled

    tiling = TILINGS[dtype.name][0]
    ptx, _ = build(register_tiled(dtype, tiling, tiling.vector), dtype, (9, 0), "-maxrregcount=255")
    steps = tiling.thread_rows * tiling.thread_columns * tiling.depth * (4 if dtype.kind == "c" else 1)
    assert len(re.findall(r"fma\.rn\.f(32|64)", ptx)) == steps
    assert not re.search(r"(add|sub|mul|mad)(\.rn)?\.f(32|64)", ptx)
    assert re.search(r"ld\.shared\.v[24]\.", ptx)
    assert re.search(r"st\.global\.v[24]\.|complex128", ptx + dtype.name)
    assert re.search(r"cp\.async\.cg\.shared\.global", ptx)


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
