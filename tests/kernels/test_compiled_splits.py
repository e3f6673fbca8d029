"""Builds the kernels that split float32 operands, without a GPU, and reads what the compiler says."""

from __future__ import annotations

import re

import pytest

from distmm_kernels.formats import FP16_PAIR, TF32, TF32_PAIR

pytestmark = pytest.mark.compile

KERNELS = [
    ("split_rows", (FP16_PAIR, True, 8)),
    ("split_rows", (FP16_PAIR, False, 1)),
    ("split_rows", (TF32_PAIR, True, 8)),
    ("split_rows", (TF32, False, 8)),
    ("find_maxima", (True,)),
    ("split_columns", (FP16_PAIR, True)),
    ("split_columns", (FP16_PAIR, False)),
    ("split_transposed", (TF32_PAIR,)),
]


@pytest.mark.parametrize(("name", "parameters"), KERNELS)
def test_splitting_stays_in_registers_with_four_blocks_a_multiprocessor(name, parameters):
    compiler = pytest.importorskip("distmm_kernels.compiler")
    try:
        compiler.versions()
    except Exception as error:  # each library's own error when its file is not there
        pytest.skip(f"the CUDA compiler is not installed: {error}")
    from distmm_kernels.device_code import prepass

    source = getattr(prepass, name)(*parameters)
    built = compiler.build(source, (9, 0))
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in built.log
    registers = int(re.search(r"[Uu]sed (\d+) registers", built.log).group(1))
    assert registers * source.threads * 4 <= 65536
