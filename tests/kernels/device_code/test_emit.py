"""What this package takes from numba-cuda and llvmlite: these tests fail first when either changes."""

from __future__ import annotations

import ast
import gc
import importlib.metadata
from pathlib import Path

import pytest

import distmm_kernels
from distmm_kernels.launch.driver import array_arguments

PACKAGE = Path(distmm_kernels.__file__).parent


@pytest.fixture
def emit():
    from numba import config

    if config.ENABLE_CUDASIM:
        pytest.skip("the simulator compiles nothing")
    from distmm_kernels.device_code import emit

    return emit


def test_the_installed_numba_cuda_is_one_that_the_kernels_were_seen_on(emit):
    installed = importlib.metadata.version("numba-cuda")
    assert installed.startswith(tuple(f"{seen}." for seen in emit.VERSIONS_SEEN)), (
        f"numba-cuda {installed}: run pytest -m compile and pytest -m gpu, then add it to emit.VERSIONS_SEEN"
    )


def test_numba_cuda_passes_arrays_as_launches_do(emit):
    emit.check.__wrapped__()
    assert len(array_arguments(0, (2, 3, 4), (48, 16, 4), 4)) == len(emit.ARRAY_FIELDS) - 2 + 2 * 3
    address = emit.ARRAY_FIELDS.index("data")
    assert array_arguments(77, (2,), (4,), 4)[address] == 77


def test_another_numba_cuda_is_refused_before_a_kernel_is_built(emit, monkeypatch):
    monkeypatch.setattr(emit, "ARRAY_FIELDS", ("data", "shape", "strides"))
    with pytest.raises(RuntimeError, match=r"numba-cuda \S+ passes an array as \('meminfo'.*install"):
        emit.check.__wrapped__()


# What device code asks of llvmlite: a successor of numba-cuda, or another version of llvmlite, must have it.
BUILDER_METHODS = {
    "add", "addrspacecast", "and_", "ashr", "bitcast", "extract_element", "extract_value", "fadd", "fma", "fmul",
    "fsub", "gep", "icmp_signed", "if_then", "insert_element", "load", "lshr", "mul", "or_", "ptrtoint", "select",
    "sext", "shl", "store", "sub", "trunc", "xor", "zext",
}  # fmt: skip


def test_device_code_asks_builders_for_the_named_methods_only():
    from llvmlite import ir

    called = set()
    for path in (PACKAGE / "device_code").rglob("*.py"):
        if path.name == "emit.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("builder", "self.builder"):
                called.add(node.attr)
    assert called == BUILDER_METHODS
    assert all(hasattr(ir.IRBuilder, name) for name in called)


def test_scopes_are_copied_and_garbage_is_collected_again_after_a_build_that_fails_too(emit):
    from numba.cuda.core.ir import Scope

    before = dict(vars(Scope))

    def build():
        with emit.shared_scopes():
            assert vars(Scope).keys() - before.keys() == {"__deepcopy__"}
            assert not gc.isenabled()
            raise ValueError("from the compiler")

    with pytest.raises(ValueError, match="from the compiler"):
        build()
    assert dict(vars(Scope)) == before
    assert gc.isenabled()


def written(**options):
    from llvmlite import ir

    from distmm_kernels.device_code.emit import I32, assembly

    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    assembly("some.instruction $0;", [I32], [], **options)(builder, [])
    return str(module)


@pytest.mark.parametrize("options", [{}, {"clobbers_memory": False}, {"pure": True, "of_warp": True}])
def test_what_threads_execute_together_never_moves_into_a_branch(options):
    assert "convergent" in written(**options)


def test_pure_instructions_of_one_thread_may_move():
    assert "convergent" not in written(pure=True)
