"""The names of Dask that `distmm.accelerate` replaces: these tests fail first when Dask moves one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest

import distmm
from distmm.accelerate import dask_names

A = da.ones((6, 2), chunks=(2, 2))


class Found(Exception):  # noqa: N818
    """Dask has found the function that was put there."""


def finding(name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise Found(name)

    return function


@pytest.fixture
def replaced() -> Iterator[None]:
    dask_names.put({name: finding(name) for name in dask_names.PLACES})
    yield
    dask_names.take_back()


def test_each_name_is_one_function_wherever_dask_has_it() -> None:
    for name, places in dask_names.PLACES.items():
        assert {getattr(import_module(place), name) for place in places} == {dask_names.ORIGINALS[name]}


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "A @ B": ("matmul", lambda: A @ A.T),
    "B @ A with B of NumPy": ("matmul", lambda: np.ones((6, 6)) @ A),
    "np.matmul": ("matmul", lambda: np.matmul(A, A.T)),
    "da.matmul": ("matmul", lambda: da.matmul(A, A.T)),
    "A.dot": ("tensordot", lambda: A.dot(A.T)),
    "np.dot": ("tensordot", lambda: np.dot(A, A.T)),
    "da.dot": ("tensordot", lambda: da.dot(A, A.T)),
    "da.vdot": ("tensordot", lambda: da.vdot(A, A)),
    "np.tensordot": ("tensordot", lambda: np.tensordot(A, A.T, axes=1)),
    "da.tensordot": ("tensordot", lambda: da.tensordot(A, A.T, axes=1)),
    "np.einsum": ("einsum", lambda: np.einsum("ij,ik", A, A)),
    "da.einsum": ("einsum", lambda: da.einsum("ij,ik", A, A)),
    "da.linalg.tsqr": ("tsqr", lambda: da.linalg.tsqr(A)),
    "da.linalg.qr": ("tsqr", lambda: da.linalg.qr(A)),
    "da.linalg.svd": ("tsqr", lambda: da.linalg.svd(A)),
    "da.linalg.svd_compressed": ("tensordot", lambda: da.linalg.svd_compressed(A, 1)),
}


@pytest.mark.parametrize("call", CALLS)
def test_dask_looks_its_functions_up_when_it_is_called(call: str, replaced: None) -> None:
    name, function = CALLS[call]
    with pytest.raises(Found, match=name):
        function()


def test_a_compressed_svd_looks_up_its_qr(monkeypatch: pytest.MonkeyPatch) -> None:
    dask_names.put({"tsqr": finding("tsqr")})
    try:
        with pytest.raises(Found, match="tsqr"):
            da.linalg.svd_compressed(A, 1)
    finally:
        dask_names.take_back()


def test_subscripts_are_parsed_as_dask_does() -> None:
    inputs, output, operands = dask_names.parse_einsum_input(("ij,jk->ki", A, A.T))
    assert (inputs, output, len(operands)) == ("ij,jk", "ki", 2)
    inputs, output, _ = dask_names.parse_einsum_input((A, [0, ...], A, [0, ...]))
    assert inputs.split(",")[0] == inputs.split(",")[1]
    assert output in inputs


def test_those_names_are_touched_in_one_module() -> None:
    folder = Path(distmm.__file__).parent
    code = {path: re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL) for path in folder.rglob("*.py")}
    touching = r"dask\.array\.(routines|linalg|einsumfuncs)|setattr\(da"
    assert [path.name for path, text in code.items() if re.search(touching, text)] == ["dask_names.py"]
