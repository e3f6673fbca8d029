"""Builds the kernels beside those of products, without a GPU, and reads what the compiler says: splits, reductions."""

from __future__ import annotations

import re
import zlib

import pytest

from distmm_kernels.emulation.formats import FP16_PAIR, TF32_PAIR
from tests.kernels.device_code import builds

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("cuda_compiler")]

KERNELS = [
    ("copies.prepass", "split_rows", (FP16_PAIR, True, 8)),
    ("copies.prepass", "split_rows", (FP16_PAIR, False, 1)),
    ("copies.prepass", "split_rows", (TF32_PAIR, True, 8)),
    ("copies.prepass", "find_maxima", (True,)),
    ("copies.prepass", "split_columns", (FP16_PAIR, True)),
    ("copies.prepass", "split_columns", (FP16_PAIR, False)),
    ("residues", "sum_squares", (True,)),
    ("residues", "sum_squares", (False,)),
    ("residues", "find_factors", ()),
    ("residues", "split", (True,)),
    ("residues", "split", (False,)),
    ("reconstruct", "reconstruct", (False, True)),
    ("reconstruct", "reconstruct", (False, False)),
    ("reconstruct", "reconstruct", (True, True)),
    ("residues", "sum_squares", (True, 2)),
    ("residues", "sum_squares", (False, 2)),
    ("residues", "find_factors", (2,)),
    ("residues", "split", (True, 2)),
    ("residues", "split", (False, 2)),
    ("reconstruct_complex", "reconstruct", (False, True)),
    ("reconstruct_complex", "reconstruct", (False, False)),
    ("reconstruct_complex", "reconstruct", (True, True)),
    ("reconstruct_complex", "reconstruct", (False, True, True)),
    ("reconstruct_complex", "reconstruct", (True, False, True)),
    ("slices", "add_slices", ("float32", "float32", False)),
    ("slices", "add_slices", ("float32", "bfloat16", True)),
    ("slices", "add_slices", ("float32", "float16", False)),
    ("slices", "add_slices", ("int32", "int32", True)),
    *(("integer_residues", "split", (bits, along_k)) for bits in (32, 64) for along_k in (True, False)),
    *(("integer_residues", "reconstruct", (bits, adds)) for bits in (32, 64) for adds in (True, False)),
    ("copies.real_view", "source", ("float32", False)),
    ("copies.real_view", "source", ("float32", True)),
    ("copies.real_view", "source", ("float64", True)),
    *(("largest", "of_rows", ("float32", weighing, r, 8, 32, 4)) for weighing in ("", "times") for r in (1, 4)),
    *(("largest", "of_rows", (dtype, "", 4, 4, 32, 4)) for dtype in ("float64", "int64")),
    *(("above", "above", (dtype, picks, 8, 32, 4)) for dtype in ("float32", "int64") for picks in (False, True)),
    *(("thin_products", "times_vectors", (dtype,)) for dtype in ("bfloat16", "float16", "float32", "float64")),
    *(("largest", "of_columns", (dtype, "times", 4, 4, 32, 16)) for dtype in ("float32", "float64")),
]

# Products use them on Hopper; each is built for one more architecture, whatever other kernels are listed.
OTHERS = [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]
CASES = [
    *((*kernel, (9, 0)) for kernel in KERNELS),
    *((*kernel, OTHERS[zlib.crc32(repr(kernel).encode()) % len(OTHERS)]) for kernel in KERNELS),
]

# For these modules and generations of GPUs the compiler stores up to 52 bytes of registers in memory. The kernels wait
# for memory, so it costs little.
SPILLING = {
    ("copies.prepass", 10), ("copies.prepass", 12), ("slices", 10), ("slices", 12), ("largest", 8), ("residues", 12),
}  # fmt: skip


@pytest.mark.parametrize(("module", "reals"), [("reconstruct", 1), ("reconstruct_complex", 2)])
def test_numbers_are_reconstructed_by_integers_where_float64_units_are_few(module, reals):
    counts = [
        len(re.findall(r"(fma|add|sub|mul|cvt)\.[a-z.]*f64", builds.reconstruction(module, by_integers, (8, 9))))
        for by_integers in (False, True)
    ]
    # three sums of fifteen products, and fifteen residues, for each real of four elements
    assert counts[0] >= 4 * reals * 60
    assert 3 * counts[1] < counts[0]


@pytest.mark.parametrize(("module", "name", "parameters", "architecture"), CASES)
def test_they_stay_in_registers_with_several_blocks_a_multiprocessor(module, name, parameters, architecture):
    built, blocks = builds.beside(module, name, parameters, architecture)
    spilled = [int(each) for each in re.findall(r"(\d+) bytes spill (?:stores|loads)", built.log)]
    assert max(spilled) <= (64 if (module, architecture[0]) in SPILLING else 0)
    registers = int(re.search(r"[Uu]sed (\d+) registers", built.log).group(1))
    assert blocks * built.threads >= 512
    assert registers * built.threads * blocks <= 65536
