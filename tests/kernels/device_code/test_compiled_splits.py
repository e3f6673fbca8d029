"""Builds the kernels that split operands, without a GPU, and reads what the compiler says."""

from __future__ import annotations

import re

import pytest

from distmm_kernels.emulation.formats import FP16_PAIR, TF32, TF32_PAIR
from tests.kernels.device_code import builds

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("cuda_compiler")]

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
]


@pytest.mark.parametrize(("module", "name", "parameters"), KERNELS)
@pytest.mark.apart(function=builds.splitting)
def test_splitting_stays_in_registers_with_several_blocks_a_multiprocessor(made, module, name, parameters):
    built, blocks = made
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in built.log
    registers = int(re.search(r"[Uu]sed (\d+) registers", built.log).group(1))
    assert blocks >= (2 if module == "reconstruct_complex" else 3)
    assert registers * built.threads * blocks <= 65536
