"""Builds the kernels beside those of products, without a GPU, and reads what the compiler says: splits, reductions."""

from __future__ import annotations

import importlib
import re

import pytest

from distmm_kernels.emulation.formats import FP16_PAIR, TF32, TF32_PAIR
from distmm_kernels.reductions.largest import SHAPES

pytestmark = pytest.mark.compile

KERNELS = [
    ("copies.prepass", "split_rows", (FP16_PAIR, True, 8)),
    ("copies.prepass", "split_rows", (FP16_PAIR, False, 1)),
    ("copies.prepass", "split_rows", (TF32_PAIR, True, 8)),
    ("copies.prepass", "split_rows", (TF32, False, 8)),
    ("copies.prepass", "find_maxima", (True,)),
    ("copies.prepass", "split_columns", (FP16_PAIR, True)),
    ("copies.prepass", "split_columns", (FP16_PAIR, False)),
    ("copies.prepass", "split_transposed", (TF32_PAIR,)),
    ("residues", "sum_squares", (True,)),
    ("residues", "sum_squares", (False,)),
    ("residues", "find_factors", ()),
    ("residues", "split", (True,)),
    ("residues", "split", (False,)),
    ("reconstruct", "reconstruct", (True,)),
    ("reconstruct", "reconstruct", (False,)),
    ("residues", "sum_squares", (True, 2)),
    ("residues", "sum_squares", (False, 2)),
    ("residues", "find_factors", (2,)),
    ("residues", "split", (True, 2)),
    ("residues", "split", (False, 2)),
    ("reconstruct_complex", "reconstruct", (True,)),
    ("reconstruct_complex", "reconstruct", (False,)),
    ("copies.real_view", "source", ("float32", False)),
    ("copies.real_view", "source", ("float32", True)),
    ("copies.real_view", "source", ("float64", True)),
    *(("largest", "largest", ("float32", weighing, *shape)) for weighing in ("", "times") for shape in SHAPES),
    *(("largest", "largest", (dtype, "", *SHAPES[0])) for dtype in ("float64", "int64")),
]


# Kernels that use what is split run on the second of these; the others have tensor cores for it too.
OTHERS = [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]
CASES = [
    *((*kernel, (9, 0)) for kernel in KERNELS),
    *((*KERNELS[i], OTHERS[i % len(OTHERS)]) for i in range(len(KERNELS))),
]


@pytest.mark.parametrize(("module", "name", "parameters", "architecture"), CASES)
def test_splitting_stays_in_registers_with_several_blocks_a_multiprocessor(module, name, parameters, architecture):
    compiler = pytest.importorskip("distmm_kernels.launch.compiler")
    try:
        compiler.versions()
    except Exception as error:  # each library's own error when its file is not there
        pytest.skip(f"the CUDA compiler is not installed: {error}")
    source = getattr(importlib.import_module(f"distmm_kernels.device_code.{module}"), name)(*parameters)
    built = compiler.build(source, architecture)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in built.log
    registers = int(re.search(r"[Uu]sed (\d+) registers", built.log).group(1))
    assert source.blocks >= (2 if module == "reconstruct_complex" else 3)
    assert registers * source.threads * source.blocks <= 65536
