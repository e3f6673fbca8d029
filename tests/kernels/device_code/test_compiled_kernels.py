"""Builds the CUDA kernels for several architectures where there is no GPU, and reads what the compiler says."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from distmm_kernels.config import SUPPORTED
from distmm_kernels.tiles.fragment_tiles import tilings as fragment_tilings
from distmm_kernels.tiles.fragment_tiles import tilings_of_halves
from distmm_kernels.tiles.mma_tiles import tilings
from distmm_kernels.tiles.tiling import TILINGS
from tests.kernels.device_code import builds

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("cuda_compiler")]

# what each of T4, A100, A10, L4, H100, B200 and RTX 50 is; asynchronous copies begin with the second
ARCHITECTURES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


# every type for one architecture, and the narrowest and the widest for the others: they differ little
@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [
        *((dtype, (9, 0)) for dtype in SUPPORTED),
        *((np.dtype(name), other) for name in ("int8", "complex128") for other in ARCHITECTURES if other != (9, 0)),
    ],
)
@pytest.mark.parametrize("kernel", ["naive", "tiled"])
def test_kernels_build_without_spills_and_fit_a_block_of_1024_threads(kernel, dtype, architecture):
    ptx, log = builds.simple(kernel, dtype, architecture)
    assert ".local" not in ptx
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", log)))
    assert 0 < registers <= 64, "65536 registers / 1024 threads"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_the_function_of_a_row_builds_without_spills(dtype, architecture):
    ptx, log = builds.function_of_a_row(dtype, architecture)
    assert ".local" not in ptx
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


# every tiling for one architecture, and the large ones for the others: they differ little
@pytest.mark.parametrize(
    ("dtype", "size", "wide", "architecture"),
    [
        *((dtype, size, True, (9, 0)) for dtype in TILINGS for size in (0, 1)),
        *((dtype, 0, False, (9, 0)) for dtype in TILINGS),
        *(
            (dtype, 0, True, architecture)
            for dtype in TILINGS
            for architecture in ARCHITECTURES[1:]
            if architecture != (9, 0)
        ),
    ],
)
def test_register_tiles_stay_in_registers(dtype, size, wide, architecture):
    made = builds.register_tiles(dtype, size, wide, architecture)
    tiling = TILINGS[dtype][size]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", made.log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(
    ("along_k", "architecture"),
    [
        *((along_k, (9, 0)) for along_k in itertools.product((False, True), repeat=2)),
        *(((True, False), architecture) for architecture in ARCHITECTURES[1:] if architecture != (9, 0)),
    ],
)
def test_tiles_of_a_warps_instructions_stay_in_registers(along_k, architecture, size, wide):
    made = builds.warp_tiles(along_k, architecture, size, wide)
    tiling = dataclasses.replace(tilings(architecture)[size], along_k=along_k)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", made.log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"
    assert made.shared_bytes in (0, tiling.shared_bytes)


@pytest.mark.parametrize("architecture", [(8, 0), (9, 0)])
def test_every_product_of_a_warps_instructions_is_one_on_tensor_cores(architecture):
    ptx, _ = builds.warp_instructions(architecture)
    (rows, steps), tiling = {(8, 0): (8, 4), (9, 0): (16, 8)}[architecture], tilings(architecture)[0]
    in_row = tiling.thread_columns // 2
    each = 8 * tiling.thread_rows // rows * in_row * tiling.depth // steps
    early = tiling.early * 16 // rows * in_row  # of the first step
    assert len(re.findall(rf"mma\.sync\.aligned\.m{rows}n8k{steps}\.row\.col\.f64", ptx)) == each + early
    assert not re.search(r"(fma|add|sub|mul|mad)(\.rn)?\.f64", ptx)
    assert re.search(r"st\.global\.v2\.", ptx)


# each architecture, layout, size of elements and store, and both tilings, once or more: not all of their combinations
@pytest.mark.parametrize(
    ("operand", "along_k", "architecture", "size", "wide"),
    [
        ("bfloat16", (True, False), (9, 0), 0, True),
        ("bfloat16", (False, False), (8, 0), 0, True),
        ("bfloat16", (False, True), (8, 6), 1, True),
        ("float16", (True, True), (12, 0), 0, True),
        ("int8", (True, True), (10, 0), 0, True),
        ("tfloat32", (True, True), (8, 9), 0, False),
    ],
)
def test_fragments_stay_in_registers(operand, along_k, architecture, size, wide):
    made = builds.fragments(operand, along_k, architecture, size, wide)
    tiling = fragment_tilings(operand, architecture, along_k)[size]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", made.log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"
    assert made.shared_bytes in (0, tiling.shared_bytes)


@pytest.mark.parametrize(
    ("operand", "along_k", "architecture", "size"),
    [
        ("float16", (True, False), (8, 0), 0),
        ("float16", (False, False), (8, 6), 0),
        ("tfloat32", (True, True), (9, 0), 1),
    ],
)
def test_fragments_of_halves_stay_in_registers(operand, along_k, architecture, size):
    made = builds.fragments_of_halves(operand, along_k, architecture, size)
    tiling = tilings_of_halves(operand, architecture, along_k)[size]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", made.log)))
    assert registers * tiling.threads * tiling.blocks <= 65536, "registers of a multiprocessor"


@pytest.mark.parametrize(
    ("architecture", "size", "wide"),
    [((8, 0), 0, True), ((8, 6), 0, False), ((8, 9), 1, True), ((9, 0), 0, True), ((10, 0), 0, True),
     ((12, 0), 0, True)],
)  # fmt: skip
def test_fragments_of_residues_stay_in_registers(architecture, size, wide):
    made = builds.fragments_of_residues(architecture, size, wide)
    tiling = fragment_tilings("int8", architecture, (True, True))[size]
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
def test_fragments_are_read_by_ldmatrix_and_multiplied_by_tensor_cores(operand, instruction, reads):
    ptx, _ = builds.fragment_instructions(operand, instruction, reads)
    tiling = fragment_tilings(operand, (9, 0), tuple(not turned for turned in reads))[1]
    steps = tiling.depth // tiling.step
    assert ptx.count(f"{instruction} ") == steps * (tiling.part[0] // 16) * (tiling.part[1] // 8)
    expected = {".trans": 0, "": 0}
    for turned, edge in zip(reads, tiling.part, strict=True):
        expected[turned] += (steps + 1) * edge // 16  # and once before the loop
    for turned, count in expected.items():
        assert ptx.count(f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 ") == count
    assert "cp.async.cg.shared.global" in ptx
    assert "st.global.v2." in ptx


COPIES = [
    *("transposing uint16", "transposing complex128", "transposing words of 2", "transposing words of 4", "realigning"),
    *(f"mirroring {kind}" for kind in ("uint16", "uint32", "uint64", "complex128", "complex64 conjugated")),
]
OTHERS = [architecture for architecture in ARCHITECTURES if architecture != (9, 0)]


# each copy for Hopper and two more architectures, in turn: each architecture has copies of both kinds
@pytest.mark.parametrize(
    ("copy", "architecture"),
    [
        (copy, architecture)
        for n, copy in enumerate(COPIES)
        for architecture in ((9, 0), OTHERS[2 * n % 6], OTHERS[(2 * n + 1) % 6])
    ],
)
def test_copies_stay_in_registers(copy, architecture):
    made = builds.copies(copy, architecture)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log


@pytest.mark.parametrize("dtype", [dtype for dtype in SUPPORTED if dtype.kind == "f"])
def test_every_product_of_register_tiles_is_one_fused_step(dtype):
    ptx, _ = builds.fused_register_tiles(dtype)
    tiling = TILINGS[dtype.name][0]
    steps = tiling.thread_rows * tiling.thread_columns * tiling.depth
    assert len(re.findall(r"fma\.rn\.f(32|64)", ptx)) == steps
    assert not re.search(r"(add|sub|mul|mad)(\.rn)?\.f(32|64)", ptx)
    assert re.search(r"ld\.shared\.v[24]\.", ptx)
    assert re.search(r"st\.global\.v[24]\.", ptx)
    assert re.search(r"cp\.async\.cg\.shared\.global", ptx)


@pytest.mark.parametrize("dtype", [dtype for dtype in SUPPORTED if dtype.kind in "fc"])
def test_floating_point_steps_are_fused_and_nothing_else(dtype):
    ptx, _ = builds.simple("tiled", dtype, (9, 0))
    chain = r"fma\.rn\.f(32|64)"
    assert len(re.findall(chain, ptx)) >= (4 if dtype.kind == "c" else 1)
    assert not re.search(r"(add|sub|mul|mad)(\.rn)?\.f(32|64)", ptx)


def test_int32_steps_stay_in_32_bits():
    ptx, _ = builds.simple("tiled", SUPPORTED[2], (9, 0))
    assert SUPPORTED[2] == "int32"
    assert len(re.findall(r"mad\.lo\.s32", ptx)) >= 32
