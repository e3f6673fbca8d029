"""What the tests of compiled kernels build, each by its parameters."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np

from distmm_kernels.tiles.fragment_tiles import tilings as fragment_tilings
from distmm_kernels.tiles.fragment_tiles import tilings_of_halves
from distmm_kernels.tiles.mma_tiles import tilings
from distmm_kernels.tiles.tiling import TILINGS


def compiled(kernel, dtype, architecture, *options, signature=None):
    """PTX of a kernel in Numba's language, and the linker's log; no cubin is kept."""
    from cuda.bindings import nvjitlink
    from numba import cuda, from_dtype, types

    if signature is None:
        stack = types.Array(from_dtype(dtype), 3, "A")
        signature = types.void(stack, stack, stack, stack)
    ptx, _ = cuda.compile(kernel, signature, device=False, cc=architecture, output="ptx", abi="numba")
    options = [f"-arch=sm_{architecture[0]}{architecture[1]}", "-verbose", "-Xptxas=-v", *options]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), kernel.__name__)
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        assert nvjitlink.get_linked_cubin_size(handle) > 0
    finally:
        nvjitlink.destroy(handle)
    return ptx, log.decode()


def simple(kernel, dtype, architecture):
    """A kernel without register tiles, with blocks of 32 x 32 threads: PTX, and the log of its machine code."""
    from distmm.bench.teaching_kernels import naive_source
    from distmm_kernels.device_code import tiled
    from distmm_kernels.launch import compiler

    make = {"tiled": tiled.source, "naive": naive_source}[kernel]
    made = make(dtype.name, 32)
    ptx, _ = compiled(made.function, None, architecture, signature=made.signature)
    return ptx, compiler.build(made, architecture).log


def function_of_a_row(dtype, architecture):
    """A row of C times B, as the generalised ufunc runs it."""
    from distmm.bench.teaching_kernels import row_times_b

    function, signature = row_times_b(np.dtype(dtype))
    return compiled(function, np.dtype(dtype), architecture, signature=signature)


def fused_register_tiles(dtype):
    """The kernel with register tiles as PTX, before link-time optimisation."""
    from distmm_kernels.device_code import unrolled
    from distmm_kernels.device_code.register_tiled import register_tiled

    tiling = TILINGS[dtype.name][0]
    return compiled(register_tiled(dtype, tiling, tiling.vector, unrolled.multiply), dtype, (9, 0), "-maxrregcount=255")


def warp_instructions(architecture):
    """The kernel with tensor cores as PTX."""
    from distmm_kernels.device_code.mma import multiply
    from distmm_kernels.device_code.register_tiled import register_tiled

    dtype = np.dtype("float64")
    tiling = dataclasses.replace(tilings(architecture)[0], along_k=(True, False))
    return compiled(register_tiled(dtype, tiling, tiling.vector, multiply), dtype, architecture)


def register_tiles(dtype, size, wide, architecture):
    from distmm_kernels.device_code.register_tiled import source
    from distmm_kernels.launch import compiler

    tiling = TILINGS[dtype][size]
    return compiler.build(source(dtype, tiling, tiling.vector if wide else 1), architecture)


def warp_tiles(along_k, architecture, size, wide):
    from distmm_kernels.device_code.mma import source
    from distmm_kernels.launch import compiler

    tiling = dataclasses.replace(tilings(architecture)[size], along_k=along_k)
    return compiler.build(source("float64", tiling, tiling.vector if wide else 1), architecture)


def fragments(operand, along_k, architecture, size, wide):
    from distmm_kernels.device_code.fragments import source
    from distmm_kernels.launch import compiler

    tiling = fragment_tilings(operand, architecture, along_k)[size]
    return compiler.build(source(operand, tiling, tiling.widest if wide else 1), architecture)


def fragments_of_residues(architecture, size, wide):
    from distmm_kernels.device_code.fragments import source
    from distmm_kernels.launch import compiler

    tiling = fragment_tilings("int8", architecture, (True, True))[size]
    return compiler.build(source("int8", tiling, tiling.widest if wide else 1, True), architecture)


def fragments_of_halves(operand, along_k, architecture, size):
    from distmm_kernels.device_code.fragments import source
    from distmm_kernels.launch import compiler

    return compiler.build(source(operand, tilings_of_halves(operand, architecture, along_k)[size], 2), architecture)


def fragment_instructions(operand, instruction, reads):
    """The kernel fed by ldmatrix as PTX."""
    from distmm_kernels.device_code.fragments import source

    tiling = fragment_tilings(operand, (9, 0), tuple(not turned for turned in reads))[1]
    made = source(operand, tiling, tiling.widest)
    return compiled(made.function, None, (9, 0), "-maxrregcount=255", signature=made.signature)


def copies(copy, architecture):
    from distmm_kernels.device_code.copies import mirror, realign, transpose
    from distmm_kernels.launch import compiler

    if copy == "realigning":
        source = realign.source()
    elif copy.startswith("mirroring"):
        source = mirror.source(copy.split()[1], "conjugated" in copy)
    elif "words" in copy:
        source = transpose.source("uint32", int(copy[-1]))
    else:
        source = transpose.source(copy[12:])
    return compiler.build(source, architecture)


def reconstruction(module, by_integers, architecture):
    """The kernel that computes float64 or complex128 numbers from residues, as PTX."""
    made = importlib.import_module(f"distmm_kernels.device_code.{module}").reconstruct(by_integers, True)
    return compiled(made.function, None, architecture, signature=made.signature)[0]


def hopper(tile):
    from distmm_kernels.device_code.hopper.hopper_gemm import hopper_gemm
    from distmm_kernels.launch import compiler

    return compiler.build(hopper_gemm(tile), (9, 0))


def beside(module, name, parameters, architecture):
    """A kernel that splits operands or reduces C, and how many blocks of it a multiprocessor is to hold."""
    from distmm_kernels.launch import compiler

    source = getattr(importlib.import_module(f"distmm_kernels.device_code.{module}"), name)(*parameters)
    return compiler.build(source, architecture), source.blocks
