"""A GPU in Numba's simulator: memory, launches and threads of its cases. `test_simulator` loads it as a plugin.

Kernels run through their own launcher; only memory and the stream are NumPy's.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from numba import cuda
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.cuda.simulator.kernelapi import Dim3
from numba.np.numpy_support import as_dtype

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.device_code import fragments, mma, register_tiled
from distmm_kernels.kernel import product_shape
from distmm_kernels.launch import driver
from distmm_kernels.launch import launches as launch
from distmm_kernels.layout import stack
from tests.kernels.device_code.simulator import simulated

GPU = Device("cuda", "simulator", 0, 0, (9, 0), 1)


@pytest.fixture(autouse=True)
def numpy_memory(monkeypatch):
    """Let the launcher see NumPy arrays, of any strides, where it sees CuPy's on a GPU."""
    monkeypatch.setattr(stack, "address", lambda array: array.ctypes.data)
    monkeypatch.setattr(launch, "Launch", SimulatedLaunch)
    monkeypatch.setattr(driver, "loaded", RealigningKernel)


@pytest.fixture(autouse=True)
def loops_in_python(monkeypatch):
    """Let kernels have loops in Python where they have machine instructions on a GPU."""
    monkeypatch.setattr(register_tiled, "operations", simulated)
    monkeypatch.setattr(register_tiled, "inlined", lambda function: function)
    monkeypatch.setattr(register_tiled, "ALIGNMENT", None)  # the simulator refuses the argument
    monkeypatch.setattr(mma, "multiply", simulated.multiply_by_warp)
    monkeypatch.setattr(fragments, "multiply", lambda operand: simulated.multiply_fragments)


@pytest.fixture(autouse=True)
def threads_in_turn(monkeypatch):
    """Let one thread of a block run at a time, from barrier to barrier, in an order that turns round at each.

    Numba's own manager lets all run at once and polls them: that takes several times as long, a missing barrier shows
    by chance alone, and threads that are interrupted at the wrong moment get shared arrays of their own.
    """
    monkeypatch.setattr(simulator.BlockManager, "run", run_block)


@pytest.fixture(autouse=True)
def lines_without_their_text(monkeypatch):
    """Let shared arrays be found by file and line of the caller, without reading the source of the whole stack."""

    def extract_stack(frame):
        return [(frame.f_back.f_code.co_filename, frame.f_back.f_lineno), None]

    monkeypatch.setattr(kernelapi, "traceback", SimpleNamespace(extract_stack=extract_stack))


@pytest.fixture(autouse=True)
def warps(monkeypatch):
    """Let lanes of a warp tell each other what they have; a warp has as many lanes as the mask of an operation."""
    monkeypatch.setattr(kernelapi.FakeCUDAModule, "ballot_sync", ballot, raising=False)
    monkeypatch.setattr(kernelapi.FakeCUDAModule, "shfl_sync", shuffle, raising=False)


def ballot(_, mask, vote):
    votes = threading.current_thread().exchange(int(mask).bit_count(), vote)
    return sum(1 << lane for lane, each in enumerate(votes) if each)


def shuffle(_, mask, x, source):
    return threading.current_thread().exchange(int(mask).bit_count(), x)[source]


class Block:
    """The CUDA threads of a block, of which one runs at a time: it gives the turn to the next one.

    Attributes
    ----------
    places
        Those of the threads that are not begun yet.
    turns
        The threads that may go on, in the order of their turns.
    meeting
        The threads that wait at a barrier for others: of the block, or of a warp.
    said
        What the lanes of a warp have told each other: by warp and number of the operation.
    """

    def __init__(self, manager, place, args):
        self.manager, self.place, self.args = manager, place, args
        self.places = deque(np.ndindex(*manager._block_dim))
        self.size = len(self.places)
        self.turns, self.meeting, self.said = deque(), defaultdict(list), defaultdict(dict)
        self.error, self.done = None, threading.Event()

    def run(self):
        self.pass_on()
        self.done.wait()
        if self.error is not None:
            raise self.error

    def pass_on(self):
        if self.places:
            Turns(self).start()
        elif self.turns:
            self.turns.popleft().mine.release()
        else:
            assert not self.meeting, SOME_HAVE_ENDED
            self.done.set()


class Turns(simulator.BlockThread):
    """A CUDA thread that waits for its turn at each barrier. Without any, it goes on with the next thread of its block.

    Starting one takes longer than what a CUDA thread does, and a kernel without barriers gets by with one.
    """

    def __init__(self, block):
        super().__init__(None, block.manager, block.place, (0, 0, 0), False)
        self.block = block
        self.mine, self.operations = threading.Lock(), 0
        self.mine.acquire()

    def run(self):
        try:
            while self.block.places:
                self.threadIdx, self.operations = Dim3(*self.block.places.popleft()), 0
                self.block.manager._f(*self.block.args)
            self.block.pass_on()
        except Exception as error:
            self.block.error = error
            self.block.done.set()

    def syncthreads(self):
        self.meet("block", self.block.size)

    def exchange(self, lanes, x):
        """Return what each lane of this warp has."""
        warp, lane = divmod(self.threadIdx.x, lanes)
        said = self.block.said[warp, self.operations]
        said[lane] = x
        self.operations += 1
        self.meet(warp, lanes)
        return [said[lane] for lane in range(lanes)]

    def meet(self, barrier, count):
        there = self.block.meeting[barrier]
        there.append(self)
        if len(there) == count:
            self.block.turns.extend(reversed(self.block.meeting.pop(barrier)))
        self.block.pass_on()
        self.mine.acquire()


SOME_HAVE_ENDED = "some threads have ended, others wait at a barrier"


def run_block(manager, place, *args):
    """Do what `BlockManager.run` does."""
    Block(manager, place, args).run()


class SimulatedLaunch:
    """Does what `launch.Launch` does, from the source of the kernel in place of its machine code."""

    def __init__(self, recipe, device, blocks, stacks):
        self.source = recipe.source()
        self.dtype = as_dtype(self.source.signature.args[0].dtype)
        self.blocks, self.stacks = blocks, stacks

    def __call__(self, *addresses):
        arrays = [self.array(*each) for each in zip(self.stacks, addresses, strict=True)]
        cuda.jit(self.source.function)[self.blocks, self.source.threads](*map(FakeCUDAArray, arrays))

    def array(self, stack, address):
        if stack is None:
            assert address == 0
            return np.empty((0, 0, 0), self.dtype)
        ends = [(size - 1) * stride for size, stride in zip(stack.shape, stack.strides, strict=True)]
        below = -sum(end for end in ends if end < 0)
        held = (ctypes.c_char * (sum(map(abs, ends)) + stack.itemsize)).from_address(address - below)
        return np.ndarray(stack.shape, self.dtype, held, below, stack.strides)


class Bounded(np.ndarray):
    """Memory of a kernel: an index outside fails, a negative one too, which NumPy would count from the end."""

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        assert 0 <= index < self.size
        super().__setitem__(index, value)


class RealigningKernel:
    """What `driver.loaded` gives for the kernel of `device_code.realign`.

    Attributes
    ----------
    read
        First and last address of each array that the last launch could read from.
    """

    read: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, recipe, device):
        self.source = recipe.source()

    def launch(self, grid, values):
        def memory(_owner, _parent, count, itemsize, address, *_):
            held = (ctypes.c_char * (count * itemsize)).from_address(address)
            return FakeCUDAArray(np.ndarray(count, f"u{itemsize}", held).view(Bounded))

        read = values[:7], values[7:14]
        type(self).read[:] = [(each[4], each[4] + each[2] * each[3]) for each in read if each[2]]
        arguments = *(memory(*each) for each in read), *values[14:19], memory(*values[19:26]), *values[26:]
        cuda.jit(self.source.function)[grid, self.source.threads](*arguments)


def multiply(kernel, a, b, c=None):
    """Run the launcher into a d that holds poison, with a guard band around it."""
    shape = product_shape(a.shape, b.shape)
    whole = np.full((*shape[:-2], shape[-2] + 2, shape[-1] + 2), 99, a.dtype)
    d = whole[..., 1:-1, 1:-1]
    d[...] = np.nan if a.dtype.kind in "fc" else -77
    before = [operand.copy() for operand in (a, b, c) if operand is not None]
    kernel(Problem(1, 1, 1, a.dtype), GPU)._accumulate(a, b, c, d)
    for operand, copy in zip((a, b, c), before, strict=False):
        np.testing.assert_array_equal(operand, copy)
    result = d.copy()
    d[...] = 99
    assert (whole == 99).all(), "wrote outside C"
    return result
