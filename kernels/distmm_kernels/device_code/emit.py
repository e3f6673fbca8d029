"""Everything that the CUDA kernels use of numba-cuda and llvmlite.

No other module of the CUDA kernels imports these packages. numba-cuda is in maintenance mode; to move to its successor,
write another version of this file.

The kernels' language (``cuda.threadIdx``, ``cuda.shared.array``, number types) is re-exported as ``cuda`` and
``types``, and the usual numbers as ``f32`` to ``u64``. Which methods of llvmlite's ``IRBuilder`` intrinsics call is in
``tests/kernels/device_code/test_emit.py``.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from llvmlite import ir
from numba import config
from numba import cuda as cuda
from numba import from_dtype as from_dtype
from numba import guvectorize as guvectorize
from numba import types as types

VERSIONS_SEEN = ("0.30",)
"""Versions of numba-cuda, by their first two numbers, that this file was tested with."""

ARRAY_FIELDS = ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
"""Parameters that an array becomes, in this order. `distmm_kernels.launch.driver.array_arguments` writes them."""

f32, f64 = types.float32, types.float64
i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64

# LLVM's types and numbers: integer(bits), vector(type, count), constant(type, value)
integer, vector, constant = ir.IntType, ir.VectorType, ir.Constant
I8, I32, I64, F32, F64 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()

ANY = None  # type of an intrinsic's argument that is an array of any type


def tensor_maps(count: int = 1) -> Any:
    """Return the type of a tensor map, or of an array of them, in a kernel's signature."""
    return types.CPointer(types.UniTuple(u64, 16 * count))


PTX_NAMES = {
    "float32": "f32", "int32": "s32", "tfloat32": "tf32", "bfloat16": "bf16", "float16": "f16", "int8": "s8",
    "uint8": "u8", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip
"""What instructions call the types that tensor cores read and write."""

_LLVM = {i32: I32, u32: I32, i64: I64, u64: I64, f32: F32, f64: F64}
_LETTERS = {I32: "r", I64: "l", F32: "f", F64: "d"}  # of a register, in the constraints of inline assembly

# Numba warns of any grid of fewer than 128 blocks. Ragged last blocks are small on purpose, and where warnings are
# errors the product would fail.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

# Numba inlines these functions itself. A call would be compiled for the current device, and there may be none.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = cuda.jit(device=True, inline="always")


class Array:
    """An array that an intrinsic is given; `real` is LLVM's type of an element."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self._make = functools.cache(lambda: context.make_array(kind)(context, builder, value))
        self._builder = builder
        self.real = context.get_value_type(kind.dtype)
        self.itemsize = kind.dtype.bitwidth // 8

    @property
    def data(self) -> Any:
        """Pointer to the first element."""
        return self._make().data

    def shape(self, axis: int) -> Any:
        """Elements along an axis, an integer of 64 bits."""
        return self._builder.extract_value(self._make().shape, axis)

    def stride(self, axis: int) -> Any:
        """Bytes from an element to the next one along an axis, an integer of 64 bits."""
        return self._builder.extract_value(self._make().strides, axis)


def intrinsic(write: Callable[..., Any], arguments: Sequence[Any], result: Any = None) -> Callable[..., Any]:
    """Make a function for kernels from one that writes its instructions.

    Parameters
    ----------
    write
        Called with a builder and the arguments: values, or an `Array` for each array. A tuple is one value; the builder
        extracts its elements. Returns a value, a list of values for a tuple, or None.
    arguments
        Numba's types; `ANY` for an array.
    result
        Numba's type of the result, a tuple of types, or None.
    """
    from numba.cuda.extending import intrinsic as numba_intrinsic  # the simulator has none

    returned = types.Tuple(result) if isinstance(result, tuple) else types.void if result is None else result

    def code(context, builder, signature, values):
        given = [
            Array(context, builder, kind, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, values, strict=True)
        ]
        made = write(builder, *given)
        if made is None:
            return context.get_dummy_value()
        return context.make_tuple(builder, signature.return_type, made) if isinstance(made, list) else made

    def typed(typing_context, *given):
        kinds = [kind if wanted is ANY else wanted for kind, wanted in zip(given, arguments, strict=True)]
        return returned(*kinds), code

    # Numba reads the number of arguments off the function's signature
    names = ["typing_context", *(f"x{i}" for i in range(len(arguments)))]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return numba_intrinsic(typed)


def instruction(
    text: str, arguments: tuple[Any, ...] = (), result: Any = None, pure: bool = False
) -> Callable[..., Any]:
    """Make a function for kernels from PTX, with `arguments` and `result` as in `intrinsic`.

    Operands in `text` are ``$0``, ``$1``, ...: first the results, then the arguments. The compiler may move what is
    ``pure``, merge equal ones, or remove it.
    """
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    call = assembly(text, [_LLVM[kind] for kind in results], [_LLVM[kind] for kind in arguments], pure)

    def write(builder, *values):
        outputs = call(builder, values)
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    return intrinsic(write, arguments, result)


def assembly(
    text: str,
    outputs: list[Any],
    inputs: list[Any],
    pure: bool = False,
    clobbers_memory: bool = True,
    of_warp: bool = False,
    tied: bool = False,
) -> Callable[[Any, Any], list[Any]]:
    """Return a function of a builder and values that writes PTX and returns its results.

    Pure code touches no memory that this kernel writes. Other code keeps its order; the compiler moves loads and stores
    across it only if it does not clobber memory. If ``tied``, the last inputs are in the registers of the outputs.

    The compiler never makes code that is not pure, or that a warp executes together (``of_warp``), depend on more
    conditions than it does here: LLVM calls it convergent. Otherwise it could move an instruction of all threads into a
    branch that some of them take.
    """
    returned = ir.VoidType() if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
    kind = ir.FunctionType(returned, inputs)
    letters = [f"={_LETTERS[each]}" for each in outputs] + [_LETTERS[each] for each in inputs]
    if tied:
        letters[-len(outputs) :] = map(str, range(len(outputs)))
    constraints = ",".join([*letters, *(["~{memory}"] if clobbers_memory and not pure else [])])

    def emit(builder: Any, values: Any) -> list[Any]:
        call = ir.InlineAsm(kind, text, constraints, side_effect=not pure)
        value = builder.call(call, values, attrs=() if pure and not of_warp else ("convergent",))
        if len(outputs) < 2:
            return [value] * len(outputs)
        return [builder.extract_value(value, i) for i in range(len(outputs))]

    return emit


def is_integer(kind: Any) -> bool:
    """Whether a builder's type is an integer type."""
    return isinstance(kind, ir.IntType)


def undefined(kind: Any) -> Any:
    """Return an undefined value, to be filled in."""
    return ir.Constant(kind, ir.Undefined)


class _ByValue(ir.values.ArgumentAttributes):  # type: ignore[misc]
    """Attributes of a parameter with ``byval`` but without its type: the LLVM of NVVM for sm_90 demands that."""

    _known = {**ir.values.ArgumentAttributes._known, "byval": False}  # noqa: RUF012 (as in llvmlite)


def tensor_map_addresses(count: int) -> Callable[..., Any]:
    """Make a function that takes a kernel's tensor maps, its first parameters, and returns their addresses.

    One call takes all maps: an annotation keeps them out of local memory, and NVVM accepts one such annotation for each
    kernel.
    """

    def write(builder, *maps):
        function, module = builder.function, builder.module
        places = [next(i for i, argument in enumerate(function.args) if argument is value) for value in maps]
        for i in places:
            function.args[i].attributes = _ByValue(["byval"])
            function.args[i].attributes.align = 64
        indices = module.add_metadata([I32(i) for i in places])
        annotations = module.namedmetadata.get("nvvm.annotations") or module.add_named_metadata("nvvm.annotations")
        annotations.add(module.add_metadata((function, ir.MetaDataString(module, "grid_constant"), indices)))
        return [builder.ptrtoint(value, I64) for value in maps]

    return intrinsic(write, [ANY] * count, (u64,) * count)


def dynamic_shared_memory(alignment: int) -> Callable[[], Any]:
    """Make a function that returns the address of the block's dynamic shared memory, a multiple of the alignment."""

    def write(builder):
        name = "distmm_shared"
        memory = builder.module.globals.get(name)
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(I8, 0), name, addrspace=3)  # of shared memory
            memory.linkage, memory.align = "external", alignment
        return builder.ptrtoint(memory, I32)

    return intrinsic(write, (), u32)


def preload() -> None:
    """Read what Numba otherwise reads when it compiles its first kernel: the types, and the operations on them."""
    from numba.cuda.descriptor import cuda_target

    for context in (cuda_target.typing_context, cuda_target.target_context):
        context.refresh()


def compile_to_ltoir(
    kernel: Callable[..., None], signature: Any, target: tuple[Any, ...], threads: int, blocks: int
) -> bytes:
    """Compile a kernel to LLVM code for nvJitLink.

    Parameters
    ----------
    target
        Compute capability, with ``"a"`` as its third element for the instructions of that architecture alone.
    threads, blocks
        Threads of a block, and blocks that a multiprocessor must hold at once; 0 if that does not bound registers.

    Raises
    ------
    RuntimeError
        If this file does not support the installed numba-cuda.
    """
    check()
    code: bytes
    how: dict[str, Any] = {"launch_bounds": (threads, blocks)} if blocks else {}
    with shared_scopes():
        code, _ = cuda.compile(kernel, signature, device=False, abi="numba", cc=target, output="ltoir", **how)
    return code


@contextmanager
def shared_scopes() -> Iterator[None]:
    """Let Numba inline functions without copies of what never changes, while this process compiles a kernel.

    numba-cuda copies a function that it inlines block by block, by ``copy.deepcopy``: with each block the function's
    scope, which has all of its variables, and with each statement its place in the source. A Hopper kernel is compiled
    in 5.0 s with these copies, and in 2.0 s without. The machine code is the same
    (``tests/kernels/device_code/test_compiled_hopper.py``). Nothing is collected as garbage meanwhile: compilers make
    many objects.
    """
    from numba.cuda.core.compiler_lock import global_compiler_lock
    from numba.cuda.core.ir import Loc, Scope

    with global_compiler_lock, ExitStack() as changed:  # nothing else is compiled meanwhile
        for kind in (Loc, Scope):
            kind.__deepcopy__ = lambda it, _: it
            changed.callback(delattr, kind, "__deepcopy__")
        if gc.isenabled():
            gc.disable()
            changed.callback(gc.enable)
        yield


@functools.cache
def check() -> None:
    """Raise RuntimeError if arrays do not become the parameters that launches pass, before any kernel is built."""
    from importlib.metadata import version

    from numba.cuda.descriptor import cuda_target

    manager = cuda_target.target_context.data_model_manager
    fields = tuple(manager.lookup(types.Array(types.float32, 3, "A"))._fields)
    if fields != ARRAY_FIELDS:
        raise RuntimeError(
            f"numba-cuda {version('numba-cuda')} passes an array as {fields}, launches as {ARRAY_FIELDS}: install "
            f"numba-cuda {' or '.join(VERSIONS_SEEN)}, or change {__name__} to suit this one"
        )
