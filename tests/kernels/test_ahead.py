"""Kernels that are built ahead: which ones, that they are built once, and where products find them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from distmm_kernels import ahead
from distmm_kernels.launch.binary import binary, kept

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("dtype", ahead.TYPES)
def test_each_type_has_kernels_that_can_be_made_on_every_architecture_since_ampere(dtype):
    for capability in CAPABILITIES:
        found = ahead.recipes(capability, dtype)
        assert len(set(found)) == len(found) > 10
        for recipe in found if capability in ((8, 9), (9, 0)) else found[::9]:
            assert recipe.source().specific <= (capability == (9, 0))


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((9, 0), "bool")])
def test_architectures_and_types_without_kernels_are_refused_with_those_that_have_some(capability, dtype):
    with pytest.raises(ValueError, match=r"give 8\.0 or a later one, and types among float32"):
        list(ahead.build(capability, [dtype]))


def test_a_build_that_is_soon_given_up_has_built_a_kernel_that_was_missing(monkeypatch):
    some = ahead.recipes((9, 0), "float32")[:3]
    monkeypatch.setattr(ahead, "recipes", lambda *_: some)
    monkeypatch.setattr(ahead, "kept", lambda recipe, _: SimpleNamespace(cubin=b"there") if recipe != some[2] else None)
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", lambda *_, **more: ThreadPoolExecutor(1))
    monkeypatch.setattr(ahead, "preloaded", lambda: None)
    monkeypatch.setattr(ahead, "_size", lambda *_: 99)
    assert list(ahead.build((9, 0), ["float32"])) == [99, 5, 5]


@pytest.mark.compile
@pytest.mark.usefixtures("cuda_compiler")
def test_built_kernels_are_found_in_the_cache_and_in_a_folder_that_is_only_read(monkeypatch, tmp_path):
    some = ahead.recipes((8, 9), "float32")[-3:]
    monkeypatch.setattr(ahead, "recipes", lambda *_: some)
    for folder in ("first", "second"):
        monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path / folder))
        sizes = list(ahead.build((8, 9), ["float32"], processes=2))
    assert list(ahead.build((8, 9), ["float32"], processes=2)) == sizes, "nothing is built again"
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second")]
    assert len(files[0]) == 3
    assert files[0] == files[1], "the same source gives the same bytes"
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path / "empty"))
    assert kept(some[0], (8, 9)) is None
    monkeypatch.setenv("DISTMM_KERNELS_DIR", str(tmp_path / "first"))
    assert [len(binary(recipe, (8, 9)).cubin) for recipe in some] == sizes
    assert not (tmp_path / "empty").exists()
