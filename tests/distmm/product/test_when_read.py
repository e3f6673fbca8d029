"""Operands are read when the product is computed: arrays of any size, memory maps, with a cluster and without."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.errors import InputError
from distmm.product.chains import Chains
from distmm.product.choices import Choices
from distmm.product.operand import wrap
from distmm.product.product import Gemm
from distmm.transfer import lending

SMALL, LARGE = 40, 400  # edges of float64 matrices: the second one has more bytes than `lending.SMALLEST`

Compute = Callable[[Any], np.ndarray]


@pytest.fixture(params=["cluster", "cluster out of reach", "no cluster"])
def compute(request: pytest.FixtureRequest, client: Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What computes a product, given to a function that describes it."""
    if request.param == "no cluster":
        with dask.config.set(scheduler="threads"):
            yield lambda make: make(None).compute
        return
    if request.param == "cluster out of reach":
        monkeypatch.setattr(lending, "_within_reach", lambda client: False)
    with client.as_current():
        yield lambda make: make(client).compute


def whole(rng: np.random.Generator, n: int) -> np.ndarray:
    """Whole numbers: their products have the same bits however they are cut."""
    return rng.integers(-9, 9, (n, n)).astype("f8")


@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_arrays_are_read_when_the_product_is_computed(compute: Any, n: int, cuts: int) -> None:
    rng = np.random.default_rng(n)
    a, b, c = whole(rng, n), whole(rng, n), whole(rng, n)
    blocks = (n // cuts,) * 3
    finish = compute(lambda client: distmm.gemm(1, a, b, 1, c, transb=True, blocks=blocks, client=client))
    a[:], b[:], c[:] = whole(rng, n), whole(rng, n), whole(rng, n)
    np.testing.assert_array_equal(finish(), a @ b.T + c)


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_arrays_with_gaps_everywhere_are_read_at_the_call(compute: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = whole(rng, 2 * n)[::2, ::2], np.eye(n)
    expected = a.copy()
    finish = compute(lambda client: distmm.matmul(a, b, client=client))
    a[:] = 0
    np.testing.assert_array_equal(finish(), expected)


def test_vectors_are_read_when_the_product_is_computed(compute: Any) -> None:
    x, y = np.ones(30), np.ones(30)
    finish = compute(lambda client: distmm.matmul(x, y, client=client))
    x[:] = 2
    assert finish() == 60


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_memory_map_has_the_elements_that_its_user_sees(compute: Any, tmp_path: Path, n: int, mode: Any) -> None:
    rng = np.random.default_rng(n)
    np.save(tmp_path / "a.npy", whole(rng, n))
    a, b = np.load(tmp_path / "a.npy", mmap_mode=mode), whole(rng, n)
    if mode != "r":
        a[1] += 5
    finish = compute(lambda client: distmm.matmul(a, b, client=client))
    if mode != "r":
        a[2] -= 7  # in memory alone, where the map is copied on writing
    np.testing.assert_array_equal(finish(), np.asarray(a) @ b)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux tells which file is mapped")
@pytest.mark.parametrize("how", ["replaced", "moved and replaced", "removed"])
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_file_replaced_before_the_call_has_the_elements_that_its_user_sees(
    compute: Any, tmp_path: Path, n: int, how: str
) -> None:
    path, rng = tmp_path / "a.npy", np.random.default_rng(n)
    np.save(path, whole(rng, n))
    a, b = np.load(path, mmap_mode="r"), whole(rng, n)
    if how == "moved and replaced":
        path.rename(tmp_path / "old.npy")
    else:
        path.unlink()
    if how != "removed":
        np.save(path, whole(rng, n))
    finish = compute(lambda client: distmm.matmul(a, b, client=client))
    np.testing.assert_array_equal(finish(), np.asarray(a) @ b)


def test_a_copy_on_write_map_is_checked_as_its_user_sees_it(client: Client, tmp_path: Path) -> None:
    n = LARGE
    np.save(tmp_path / "a.npy", np.zeros((n, n)))
    a, b = np.load(tmp_path / "a.npy", mmap_mode="c"), np.eye(n)
    a[:] = np.arange(n)
    with client.as_current():
        assert distmm.verify(a, b, np.array(a))


def test_a_copy_on_write_map_is_what_its_user_sees_wherever_it_is_given(compute: Any, tmp_path: Path) -> None:
    n = LARGE
    np.save(tmp_path / "a.npy", np.zeros((n, n)))
    a, one = np.load(tmp_path / "a.npy", mmap_mode="c"), np.eye(n)
    a[:] = whole(np.random.default_rng(0), n)
    seen = np.array(a)
    for given, call in (
        (seen[7:90], lambda client: distmm.matmul(a[7:90], one, client=client)),
        (seen.T, lambda client: distmm.matmul(one, a.T, client=client)),
        (seen, lambda client: distmm.gemm(0, one, one, 1, a, client=client)),
        (seen, lambda client: distmm.matmul(da.from_array(a, chunks=n // 2), one, client=client)),
        (seen @ seen.T, lambda client: distmm.gram(a, client=client)),
    ):
        np.testing.assert_array_equal(compute(call)(), given)


def test_a_job_reads_a_copy_on_write_map_as_its_user_sees_it(client: Client, tmp_path: Path) -> None:
    n = LARGE
    np.save(tmp_path / "a.npy", np.zeros((n, n)))
    a = np.load(tmp_path / "a.npy", mmap_mode="c")
    a[:] = whole(np.random.default_rng(0), n)
    distmm.multiply(a, np.eye(n), tmp_path / "c.npy", client=client)
    np.testing.assert_array_equal(np.load(tmp_path / "c.npy"), a)


def test_an_out_that_is_mapped_copy_on_write_is_filled_in_memory_alone(client: Client, tmp_path: Path) -> None:
    n = LARGE
    np.save(tmp_path / "c.npy", np.zeros((n, n)))
    out, b = np.load(tmp_path / "c.npy", mmap_mode="c"), whole(np.random.default_rng(0), n)
    distmm.matmul(np.eye(n), b, out=out, client=client)
    np.testing.assert_array_equal(out, b)
    assert not np.load(tmp_path / "c.npy").any()


@pytest.mark.parametrize("how", ["replaced", "removed", "cut short"])
def test_a_file_that_is_no_more_the_one_of_the_call_is_an_error(
    compute: Any, tmp_path: Path, how: Literal["replaced", "removed", "cut short"]
) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((SMALL, SMALL)))
    a = np.load(path, mmap_mode="r")
    finish = compute(lambda client: distmm.matmul(a, np.eye(SMALL), client=client))
    if how == "replaced":
        np.save(tmp_path / "new.npy", np.ones((SMALL, SMALL)))
        os.replace(tmp_path / "new.npy", path)
    elif how == "removed":
        path.unlink()
    else:
        os.truncate(path, 200)
    message = "is another file than at the call.*map it again" if how == "replaced" else "cannot be mapped again"
    with pytest.raises(InputError, match=f"a\\.npy {message}"):
        finish()


def test_a_file_replaced_between_two_waves_is_an_error(tmp_path: Path) -> None:
    n, path = 64, tmp_path / "a.npy"
    np.save(path, np.ones((n, n)))
    a = np.load(path, mmap_mode="r")
    gemm = Gemm.of(wrap(a, "A"), wrap(np.eye(n), "B"))
    plan = gemm.plan(Choices(blocks=(16, 64, 64)))
    chains = Chains(gemm, plan, "numpy", None)
    np.testing.assert_array_equal(chains.arrays(None)[0].compute(scheduler="synchronous"), a)
    np.save(tmp_path / "new.npy", np.zeros((n, n)))
    os.replace(tmp_path / "new.npy", path)
    with pytest.raises(InputError, match="another file than at the call"):
        chains.arrays(None)[0].compute(scheduler="synchronous")


def test_a_file_that_was_copied_with_its_times_is_read(tmp_path: Path) -> None:
    """As on the local disk of another machine."""
    path = tmp_path / "a.npy"
    np.save(path, np.ones((SMALL, SMALL)))
    a = np.load(path, mmap_mode="r")
    product = distmm.matmul(a, np.eye(SMALL))
    facts = os.stat(path)
    (tmp_path / "copy.npy").write_bytes(path.read_bytes())
    os.utime(tmp_path / "copy.npy", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(tmp_path / "copy.npy", path)
    assert os.stat(path).st_ino != facts.st_ino
    np.testing.assert_array_equal(product.compute(scheduler="synchronous"), np.ones((SMALL, SMALL)))


def test_no_block_travels_with_the_others() -> None:
    a = np.ones((200, 200))
    product = distmm.matmul(a, np.eye(200), blocks=(50, 50, 50))
    sizes = [len(pickle.dumps(task)) for key, task in product.__dask_graph__().items() if "client" in key[0]]
    assert len(sizes) == 32
    assert max(sizes) < 50 * 50 * 8 + 2000
