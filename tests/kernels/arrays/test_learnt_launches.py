"""What a call on a GPU's arrays keeps, and when a further call uses it; NumPy's arrays stand for those of a GPU."""

from __future__ import annotations

import contextlib
from unittest.mock import MagicMock

import numpy as np
import pytest

from distmm_kernels.arrays import on_gpu, products
from distmm_kernels.arrays.packages import cpu_here
from distmm_kernels.arrays.products import Options
from distmm_kernels.gemm.cpu import CpuKernel
from distmm_kernels.gemm.guarded import GuardedKernel

HERE = 0  # number of the device


def address(x):
    return x.ctypes.data


def memory(x):
    return address(x if x.base is None else x.base)


@pytest.fixture
def arrays(monkeypatch):
    monkeypatch.setattr(on_gpu, "device_of", lambda index: cpu_here())
    monkeypatch.setattr(on_gpu, "direct", {})
    return on_gpu.GpuArrays(
        layout=lambda x: (x.shape, x.strides, x.dtype, address(x) & 15, HERE),
        address=address,
        memory=memory,
        device=lambda x: HERE,
        current=lambda: HERE,
        stream=lambda device: 7,
        captured=lambda: False,
        empty=lambda shape, dtype, *operands: np.empty(shape, dtype),
        view=lambda x: x,
        working=lambda device: contextlib.nullcontext(),
        library=lambda *_: None,
    )


def test_a_launch_is_learnt_once_and_gets_the_addresses_of_further_operands(arrays, monkeypatch):
    launches = []
    learnt = on_gpu.Direct(True, lambda *places: launches.append(places), (2, 2), np.dtype("float32"))
    monkeypatch.setattr(on_gpu, "_learn", lambda key, *_: on_gpu.direct.update({key: learnt}))
    whole = np.arange(12, dtype="f4").reshape(3, 2, 2)  # matrices whose addresses have the same last bits
    first = on_gpu.multiply(arrays, whole[0], whole[1], None, None, Options())
    assert (first == whole[0] @ whole[1]).all()
    assert launches == []
    made = on_gpu.multiply(arrays, whole[1], whole[2], None, None, Options())
    assert launches == [(address(whole[1]), address(whole[2]), address(made), 7)]
    # an out in the operands' memory, and a C, are other products
    copy = whole.copy()
    on_gpu.multiply(arrays, copy[0], copy[1], copy[0], None, Options())
    assert (copy[0] == whole[0] @ whole[1]).all()
    on_gpu.multiply(arrays, whole[0], whole[1], None, first, Options(beta=1))
    assert len(launches) == 1


def test_what_a_package_computes_by_the_same_library_is_left_to_it_unless_it_declines(arrays, monkeypatch):
    launches, answers = [], [None, "made"]
    how = {"launch": lambda *places: launches.append(places), "shape": (2, 2), "dtype": np.dtype("f8")}
    of_library, own = on_gpu.Direct(False, **how, library=True), on_gpu.Direct(False, **how)
    leaving = arrays._replace(library=lambda a, b, out: answers.pop(0))
    a = np.ones((2, 2))
    for learnt, left, launched in ((of_library, 1, 1), (of_library, 0, 1), (own, 0, 2)):
        monkeypatch.setattr(on_gpu, "_learn", lambda key, *_, learnt=learnt: on_gpu.direct.update({key: learnt}))
        on_gpu.direct.clear()
        on_gpu.multiply(leaving, a, a, None, None, Options())
        made = on_gpu.multiply(leaving, a, a, None, None, Options())
        assert (isinstance(made, str), len(answers), len(launches)) == (left == 0 and learnt.library, left, launched)


def test_kernels_are_compared_once_for_a_product_and_its_launch(arrays, monkeypatch):
    monkeypatch.setattr(CpuKernel, "direct", lambda *operands: None, raising=False)
    products.chosen.cache_clear()
    a = np.ones((2, 2), "f4")
    on_gpu.multiply(arrays, a, a, None, None, Options())
    assert list(on_gpu.direct.values()) == [None]
    assert products.chosen.cache_info().misses == 1


def test_a_launch_that_a_graph_cannot_capture_is_not_used_during_a_capture(arrays, monkeypatch):
    learnt = on_gpu.Direct(False, pytest.fail, (2, 2), np.dtype("f4"))
    monkeypatch.setattr(on_gpu, "_learn", lambda key, *_: on_gpu.direct.update({key: learnt}))
    a = np.ones((2, 2), "f4")
    on_gpu.multiply(arrays, a, a, None, None, Options())
    assert len(on_gpu.direct) == 1
    captured = arrays._replace(captured=lambda: True)
    assert (on_gpu.multiply(captured, a, a, None, None, Options()) == 2).all()
    assert (on_gpu.multiply(captured, a, a.T, None, None, Options(precision="ieee")) == 2).all()
    assert len(on_gpu.direct) == 1  # nothing is learnt during a capture


def test_a_launch_of_the_library_is_kept_for_as_many_products_as_the_guards_allow(arrays, monkeypatch):
    guarded, library, launches = MagicMock(spec=GuardedKernel), MagicMock(capturable=False, guarded=False), []
    guarded.declines.return_value, guarded.patience = True, 0
    library.direct.return_value = lambda *places: launches.append(places)
    whole, looked = [], iter((0, 2))

    def product(a, b, c, out, *_, **__):
        whole.append(a)
        guarded.patience = next(looked)

    monkeypatch.setattr(on_gpu, "product", product)
    monkeypatch.setattr(products, "chosen", lambda *asked: guarded)
    monkeypatch.setattr(products, "named", lambda *asked: library)
    a = np.ones((2, 2))
    for already in range(4):
        on_gpu.multiply(arrays, a, a, None, None, Options())
        assert (len(whole), len(launches)) == ((1, 0), (2, 0), (2, 1), (2, 2))[already]
    assert not on_gpu.direct, "the next product looks at the data"


def test_arrays_on_several_devices_are_refused_with_their_places(arrays):
    a, there = np.ones((2, 2), "f4"), np.ones((2, 2), "f4")
    apart = arrays._replace(layout=lambda x: (x.shape, int(x is there)))
    with pytest.raises(ValueError, match="a: 0, b: 1"):
        on_gpu.multiply(apart, a, there, None, None, Options())
