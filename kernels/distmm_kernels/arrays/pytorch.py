"""PyTorch's tensors: an operator with a backward that ``torch.compile`` traces, and a shorter way for plain calls.

Memory of intermediate results comes from PyTorch's allocator, so a captured graph has its own.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import ml_dtypes
import numpy as np
import torch

from distmm_kernels.arrays import on_gpu
from distmm_kernels.arrays.packages import cpu_here
from distmm_kernels.arrays.products import Options, product, result_of
from distmm_kernels.launch.driver import stream_of

SCHEMA = (
    "(Tensor a, Tensor b, Tensor? c, Scalar alpha, Scalar beta, str precision, bool reproducible, str? symmetry=None)"
    " -> Tensor"
)

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_SINGLE, _DOUBLE = frozenset({torch.float32, torch.complex64}), frozenset({torch.float64, torch.complex128})

# a tenth of the microseconds of the public functions, which replace them if they are missing
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_RAW_ALLOCATION = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)


def multiply(a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    """Return ``alpha * a @ b + beta * c``. Gradients, compilers and modes of PyTorch see the operator."""
    if _is_watched(a, b, c, out):
        if out is not None and not torch.is_grad_enabled():
            return out.copy_(multiply(a, b, None, c, options))
        if out is not None:
            raise ValueError("out= has no gradient: leave out out, or call this inside of torch.no_grad()")
        left, right = (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)
        if c is not None and (a.ndim == 1 or b.ndim == 1):
            c = c.unsqueeze(-1) if b.ndim == 1 else c
            c = c.unsqueeze(-2) if a.ndim == 1 else c
        made = operator(left, right, c, *options)
        made = made.squeeze(-2) if a.ndim == 1 else made
        return made.squeeze(-1) if b.ndim == 1 else made
    return _at_once(a, b, out, c, options)


def _at_once(a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    """Return the product of tensors that nothing of PyTorch watches."""
    if a.is_conj() or a.is_neg() or b.is_conj() or b.is_neg():
        a = a.resolve_conj().resolve_neg()
        b = b.resolve_conj().resolve_neg() if options.symmetry is None else a.mT  # `gram` reads A alone
    if a.device.type != "cuda":
        return _on_host(a, b, out, c, options)
    return on_gpu.multiply(_TENSORS, a, b, out, c, options)


def _on_host(a: Any, b: Any, out: Any, c: Any, options: Options) -> Any:
    if any(x is not None and x.device.type != "cpu" for x in (a, b, c, out)):
        listed = ", ".join(str(x.device) for x in (a, b, c, out) if x is not None)
        raise ValueError(f"tensors are on {listed}: all must be on the CPU, or on one NVIDIA GPU")
    left, right, added = (None if x is None else as_array(x) for x in (a, b, c))
    if out is None:
        shape, _ = result_of(left, right, None)
        out = torch.empty(shape, dtype=_promoted(a.dtype, b.dtype))
    product(left, right, added, as_array(out), cpu_here(), options)
    return out


@functools.cache
def _promoted(a: Any, b: Any) -> Any:
    return torch.promote_types(a, b)


@functools.cache
def _numpy_type(dtype: Any) -> np.dtype[Any]:
    """Return NumPy's type, or that of ml_dtypes, of the same name."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, name))


def as_array(x: Any) -> Any:
    """Return a tensor as a NumPy or CuPy array of the same memory."""
    kind = _numpy_type(x.dtype)
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    strides = tuple(step * kind.itemsize for step in x.stride())
    if x.device.type == "cpu":
        words = x.view(torch.uint8 if kind.itemsize == 1 else torch.int16) if kind.type.__module__ != "numpy" else x
        return words.detach().numpy().view(kind)
    import cupy

    memory = cupy.cuda.UnownedMemory(x.data_ptr(), 1 + x.nbytes, x, x.device.index)
    return cupy.ndarray(tuple(x.shape), kind, cupy.cuda.MemoryPointer(memory, 0), strides)


@contextlib.contextmanager
def working(index: int) -> Any:
    """Make a device, and its current stream and memory of PyTorch, those of CuPy."""
    import cupy

    if torch.cuda.current_device() != index:
        with torch.cuda.device(index), cupy.cuda.Device(index), working(index):
            yield
        return
    handle = _stream(index)
    with cupy.cuda.using_allocator(_memory().malloc):
        if cupy.cuda.get_current_stream().ptr == handle:
            yield
        else:
            with stream_of(handle, index):
                yield


@functools.cache
def _memory() -> Any:
    """Return CuPy's way to PyTorch's allocator."""
    import cupy

    def take(size: int, device: int) -> int:
        if _RAW_ALLOCATION is not None:  # on the current device, which is this one inside of `working`
            return int(_RAW_ALLOCATION(size, _stream(device)))
        return int(torch.cuda.caching_allocator_alloc(size, device, _stream(device)))

    return cupy.cuda.PythonFunctionAllocator(take, lambda pointer, _: torch.cuda.caching_allocator_delete(pointer))


def _stream(index: int) -> int:
    """Return the handle of PyTorch's current stream of a device."""
    return int(torch.cuda.current_stream(index).cuda_stream if _RAW_STREAM is None else _RAW_STREAM(index))


def _empty(shape: tuple[int, ...], _: Any, a: Any, b: Any) -> Any:
    return a.new_empty(shape) if a.dtype is b.dtype else a.new_empty(shape, dtype=_promoted(a.dtype, b.dtype))


def _library(a: Any, b: Any, out: Any) -> Any:
    """Return PyTorch's product. None where PyTorch may cast operands, round them to TF32, or add in 16 bits."""
    try:
        rounds = a.dtype not in _DOUBLE and (a.dtype not in _SINGLE or torch._C._get_cublas_allow_tf32())
    except (AttributeError, RuntimeError):  # a version without it; settings by the older and the newer way that differ
        return None
    return None if rounds or torch.is_autocast_enabled() else torch.mm(a, b, out=out)


_TENSORS = on_gpu.GpuArrays(
    layout=lambda x: (x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.device),
    address=lambda x: x.data_ptr(),
    memory=lambda x: x.untyped_storage().data_ptr(),
    device=lambda x: x.device.index,
    current=torch.cuda.current_device,
    stream=_stream,
    captured=torch.cuda.is_current_stream_capturing,
    empty=_empty,
    view=as_array,
    working=working,
    library=_library,
)


def _is_watched(*tensors: Any) -> bool:
    """Whether anything but the numbers of these tensors matters: gradients, subclasses, transforms or modes."""
    learns = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or (learns and x.requires_grad)):
            return True
    return torch.compiler.is_compiling() or _modes()


def _modes() -> bool:
    """Whether a transform of `torch.func`, a forward derivative or a mode is active.

    PyTorch has no public name for these (seen on 2.11 and 2.13). Where one is missing, all calls take the operator.
    """
    core = torch._C
    try:
        return bool(
            core._len_torch_dispatch_stack()
            or core._len_torch_function_stack()
            or core._functorch.peek_interpreter_stack() is not None
            or torch.autograd.forward_ad._current_level >= 0
        )
    except AttributeError:
        return True


def _product(a: Any, b: Any, c: Any, *options: Any) -> Any:
    """Return the product of matrices ``(..., m, k)`` and ``(..., k, n)``."""
    return _at_once(a, b, None, c, Options(*options))


def _shape(a: Any, b: Any, c: Any, *options: Any) -> Any:
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=torch.promote_types(a.dtype, b.dtype))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, c, *ctx.options = inputs
    ctx.save_for_backward(a, b)
    ctx.added = None if c is None else (c.shape, c.dtype)


def _backward(ctx: Any, gradient: Any) -> Any:
    """Return ``alpha* g b^H``, ``a^H alpha* g`` and ``beta* g``, summed over broadcast dimensions.

    In a Hermitian product, b is a^H: the gradients of both are one, that of a. An element of C below the diagonal is
    added to two elements of the result.
    """
    (a, b), (alpha, beta, *how, symmetry) = ctx.saved_tensors, ctx.options
    of_a = of_b = of_c = None
    if symmetry is not None and ctx.needs_input_grad[0]:
        both = gradient * alpha.conjugate() + gradient.mH * alpha
        of_a = operator(both, a, None, 1, 0, *how)
    elif ctx.needs_input_grad[0]:
        of_a = operator(gradient, b.mH, None, alpha.conjugate(), 0, *how).sum_to_size(a.shape).to(a.dtype)
    if symmetry is None and ctx.needs_input_grad[1]:
        of_b = operator(a.mH, gradient, None, alpha.conjugate(), 0, *how).sum_to_size(b.shape).to(b.dtype)
    if ctx.added is not None and ctx.needs_input_grad[2]:
        shape, dtype = ctx.added
        if symmetry is not None:
            diagonal = gradient.diagonal(dim1=-2, dim2=-1).real.to(gradient.dtype)
            gradient = gradient.tril(-1) + gradient.triu(1).mH + torch.diag_embed(diagonal)
        of_c = (gradient * beta.conjugate()).sum_to_size(shape).to(dtype)
    return of_a, of_b, of_c, None, None, None, None, None


operator = torch.library.custom_op("distmm::matmul", _product, mutates_args=(), schema=SCHEMA)
operator.register_fake(_shape)
operator.register_autograd(_backward, setup_context=_keep)
