"""The function that distmm replaces in UCXX: only in known versions, and no product fails without it."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from distmm.worker import ucxx_internals


def whole_device() -> None:
    """Stands for UCXX's own function, which waits for the whole device."""


def ucxx(monkeypatch: pytest.MonkeyPatch, distributed: str, own: str, ucx: tuple[int, ...]) -> Any:
    context = types.SimpleNamespace(synchronize_default_stream=whole_device)
    package: Any = types.ModuleType("ucxx")
    package._cuda_context, package.__version__, package.get_ucx_version = context, own, lambda: ucx
    monkeypatch.setitem(sys.modules, "ucxx", package)
    monkeypatch.setitem(sys.modules, "ucxx._cuda_context", context)
    monkeypatch.setitem(sys.modules, "distributed_ucxx", types.SimpleNamespace(__version__=distributed))
    return context


def test_ucxx_waits_for_the_default_stream_only_in_versions_that_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = ucxx(monkeypatch, "0.52.00", "0.52.00", (1, 21, 0))
    ucxx_internals.wait_for_default_stream_only()
    assert known.synchronize_default_stream is ucxx_internals.synchronize_default_stream
    others = [("0.53.0", "0.52.0", (1, 21, 0)), ("0.52.0", "0.53.0", (1, 21, 0)), ("0.52.0", "0.52.0", (1, 22, 0))]
    for distributed, own, ucx in others:
        unknown = ucxx(monkeypatch, distributed, own, ucx)
        with caplog.at_level(logging.WARNING):
            ucxx_internals.wait_for_default_stream_only()
        assert unknown.synchronize_default_stream is whole_device
        assert f"distributed-ucxx {distributed}, ucxx {own}, UCX {'.'.join(map(str, ucx))}: distmm knows" in caplog.text


@pytest.mark.gpu
def test_the_function_that_is_replaced_in_ucxx_is_there() -> None:
    context = pytest.importorskip("ucxx._cuda_context")
    transfers = pytest.importorskip("distributed_ucxx.ucxx")
    assert callable(context.synchronize_default_stream)
    assert "from ucxx._cuda_context import synchronize_default_stream" in inspect.getsource(
        transfers.synchronize_stream
    )


@pytest.mark.parametrize("name", ["distributed-ucxx-cu12", "distributed-ucxx-cu13", "ucxx-cu12", "ucxx-cu13"])
def test_the_installed_version_is_one_that_was_seen(name: str) -> None:
    try:
        found = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert found.startswith(ucxx_internals.VERSIONS_SEEN[name.rpartition("-")[0]])


def test_ucxx_without_the_function_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = ucxx(monkeypatch, "0.52.00", "0.52.00", (1, 21, 0))
    del context.synchronize_default_stream
    with caplog.at_level(logging.WARNING):
        ucxx_internals.wait_for_default_stream_only()
    assert not vars(context)
    assert "transfers may wait for products" in caplog.text
    monkeypatch.setitem(sys.modules, "ucxx._cuda_context", None)  # an import of it fails
    ucxx_internals.wait_for_default_stream_only()
