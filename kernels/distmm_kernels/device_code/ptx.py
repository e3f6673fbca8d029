"""One PTX instruction, or a few, as a function of Numba's kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from distmm_kernels.device_code.llvm import intrinsic

__all__ = ["assembly", "instruction", "of_arity"]

VOID = ir.VoidType()
_LLVM = {
    types.uint16: (ir.IntType(16), "h"),
    types.int32: (ir.IntType(32), "r"),
    types.uint32: (ir.IntType(32), "r"),
    types.int64: (ir.IntType(64), "l"),
    types.uint64: (ir.IntType(64), "l"),
    types.float32: (ir.FloatType(), "f"),
    types.float64: (ir.DoubleType(), "d"),
}


def instruction(
    text: str, arguments: tuple[Any, ...] = (), result: Any = None, pure: bool = False
) -> Callable[..., Any]:
    """Make a function from PTX.

    Parameters
    ----------
    text
        Operands are ``$0``, ``$1``, ...: first the results, then the arguments.
    arguments
        Numba's types.
    result
        Numba's type of the result, a tuple of them, or None.
    pure
        The compiler may move it, merge it with its like, or drop it.
    """
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    letters = [f"={_LLVM[kind][1]}" for kind in results] + [_LLVM[kind][1] for kind in arguments]
    call = assembly(text, [_LLVM[kind][0] for kind in results], [_LLVM[kind][0] for kind in arguments], letters, pure)
    returned = types.void if not results else results[0] if len(results) == 1 else types.Tuple(results)

    def code(context, builder, signature, values):
        outputs = call(builder, values)
        if not outputs:
            return context.get_dummy_value()
        return outputs[0] if len(outputs) == 1 else context.make_tuple(builder, returned, outputs)

    return intrinsic(code, of_arity(len(arguments), lambda *_: returned(*arguments)))


def of_arity(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of any number of arguments say that it takes so many: Numba reads that off its signature."""
    names = [inspect.Parameter(f"x{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for i in range(count)]
    function.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return function


def assembly(
    text: str,
    outputs: list[Any],
    inputs: list[Any],
    letters: list[str],
    pure: bool = False,
    clobbers_memory: bool = True,
) -> Callable[[Any, Any], list[Any]]:
    """Return a function of a builder and LLVM values that emits PTX and returns its results.

    ``letters`` are the constraints of outputs and inputs, as in LLVM's inline assembly. What is pure touches no memory
    that this kernel writes; the rest keeps its order, and the compiler's loads and stores pass it only if it does not
    clobber memory.
    """
    returned = VOID if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
    kind = ir.FunctionType(returned, inputs)
    constraints = ",".join([*letters, *(["~{memory}"] if clobbers_memory and not pure else [])])

    def emit(builder: Any, values: Any) -> list[Any]:
        value = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=not pure), values)
        if len(outputs) < 2:
            return [value] * len(outputs)
        return [builder.extract_value(value, i) for i in range(len(outputs))]

    return emit
