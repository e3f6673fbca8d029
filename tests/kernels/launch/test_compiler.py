"""What the compiler's module makes of the linker's log, without a compiler."""

from __future__ import annotations

import pytest

from distmm_kernels.device_code import emit
from distmm_kernels.launch import compiler


def kernel():
    """Stand for any kernel."""


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7515"])
def test_a_kernel_whose_wgmma_ptxas_serialises_is_an_error(monkeypatch, code):
    log = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    monkeypatch.setattr(emit, "compile_to_ltoir", lambda *arguments: b"")
    monkeypatch.setattr(compiler, "_link", lambda *arguments: (b"cubin", log))
    with pytest.raises(RuntimeError, match=rf"kernel for sm_90a would wait for each tensor-core product.*{code}"):
        compiler.build(compiler.Source(kernel, None, 128, specific=True), (9, 0))
    monkeypatch.setattr(compiler, "_link", lambda *arguments: (b"cubin", "ptxas info    : Used 168 registers"))
    assert compiler.build(compiler.Source(kernel, None, 128), (9, 0)).cubin == b"cubin"
