"""The certificate of a job: right blocks pass, a flipped bit anywhere is found, and a bad block is made again."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import WrongResultError
from distmm.host import device
from distmm.job import sketch
from distmm.storage import open_matrix
from distmm.tolerance import Tolerance

M, K, N = 60, 300, 80
TYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int8", "int32", "uint64"]


def element(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def matrices(name: str, draw: str = "normal") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and their right product, as a kernel makes it: accumulated in float32 at least, rounded once."""
    rng, dtype = np.random.default_rng(1), element(name)
    a, b = (rng.standard_normal(s) if draw == "normal" else rng.random(s) for s in ((M, K), (K, N)))
    if dtype.kind in "iu":
        a, b = (100 * a).astype(int), (100 * b).astype(int)
    if dtype.kind == "c":
        a, b = a + 1j * a[::-1], b - 1j * b[::-1]
    with np.errstate(invalid="ignore"):
        a, b = a.astype(dtype), b.astype(dtype)
    wide = np.float32 if dtype.itemsize <= 2 and dtype.kind not in "iu" else dtype
    return a, b, (a.astype(wide) @ b.astype(wide)).astype(dtype)


def judged(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, seed: int = 0, column: int = 1, **more: Any
) -> sketch.Judgement:
    """Sketch A and B in three panels each, with a second block column beside, and judge C."""
    tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, K)
    left = None
    for p in range(0, K, 100):
        panel = b[p : p + 100]
        right = [sketch.of_b(None, [panel, panel], seed, (0, 1), tolerance.work)]
        left = sketch.of_a(None, left, a[:, p : p + 100], right, tolerance.work)
    assert left is not None
    x = sketch.vectors(seed, column, c.shape[1], tolerance.exact)
    return sketch.judge(tolerance, left, column, c, x, **more)


@pytest.mark.parametrize("draw", ["normal", "uniform"])
@pytest.mark.parametrize("name", TYPES)
def test_right_blocks_pass(name: str, draw: str) -> None:
    found = judged(*matrices(name, draw))
    assert (found.ok, found.settled) == (True, True)
    assert found.residual < 0.3


def bits(c: np.ndarray) -> int:
    return 8 * c.dtype.itemsize // (2 if c.dtype.kind == "c" else 1)


@pytest.mark.parametrize("name", TYPES)
def test_a_flipped_bit_in_a_product_is_found(name: str) -> None:
    """Sign, exponent and leading digits; for integers every bit."""
    a, b, c = matrices(name)
    width = bits(c)
    digits = {"float16": 10, "bfloat16": 7, "float32": 23, "complex64": 23, "float64": 52, "complex128": 52}.get(name)
    last = 0 if digits is None else max(0, digits - (2 if digits <= 10 else 6))
    for bit in range(last, width):
        wrong = c.copy()
        integers = wrong.view(f"u{width // 8}")
        integers[17, 30] ^= integers.dtype.type(1) << integers.dtype.type(bit)
        assert not judged(a, b, wrong).ok, bit


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_a_gpu_judges_blocks_in_host_memory_as_numpy_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "STAGE", 2000)  # bytes: a block goes in several pieces
    monkeypatch.setattr(device, "_idle", [])
    a, b, c = matrices(name)
    here, there = judged(a, b, c), judged(a, b, c, on_gpu=True)
    assert (there.ok, there.settled) == (here.ok, here.settled)
    assert there.residual == pytest.approx(here.residual, abs=0.01)  # rows are summed in another order
    c[17, 30] = c[17, 30] ^ 1 if c.dtype.kind in "iu" else 1000
    found = judged(a, b, c, on_gpu=True)
    assert (found.ok, found.row) == (False, 17)


def test_checksums_are_those_of_the_package_with_its_library_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [np.arange(999, dtype="f4").reshape(27, 37), np.arange(12, dtype="u2").reshape(3, 4).T, np.empty((0, 5))]
    expected = [google_crc32c.value(block.tobytes()) for block in blocks]
    crc32c = importlib.import_module("distmm.job.checksum")
    for library in (ctypes.CDLL, lambda name: types.SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        crc32c._crc32c.cache_clear()
        assert [crc32c.checksum(block) for block in blocks] == expected
    crc32c._crc32c.cache_clear()


def test_inf_and_nan_leave_nothing_to_compare() -> None:
    a, b, c = matrices("float32")
    a[3, 5] = np.inf
    found = judged(a, b, a @ b)
    assert (found.ok, found.settled) == (False, False)
    c = a @ b
    c[20, 20] += 100
    assert judged(a, b, c).settled  # the other rows still tell


@pytest.mark.parametrize("name", ["float32", "int32", "complex64"])
def test_alpha_and_beta_are_part_of_the_test(name: str) -> None:
    a, b, c = matrices(name)
    added = matrices(name, "uniform")[2]
    right = 3 * c - 2 * added
    assert judged(a, b, right, alpha=3, beta=-2, added=added).ok
    assert not judged(a, b, right, alpha=3, beta=-1, added=added).ok


def test_operands_may_be_rounded_where_the_precision_says_so() -> None:
    a, b, _ = matrices("float32")
    c = a.astype(ml_dtypes.bfloat16).astype("f4") @ b.astype(ml_dtypes.bfloat16).astype("f4")
    x = sketch.vectors(0, 0, N, False)
    for precision, right in [("highest", False), ("medium", True)]:
        tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, K, precision)
        left = sketch.of_a(None, None, a, [sketch.of_b(None, [b], 0, (0,), tolerance.work)], tolerance.work)
        assert (sketch.judge(tolerance, left, 0, c, x).residual <= 1) is right


# A job on a cluster whose workers are spoilt on purpose.


@pytest.fixture
def spoilt(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder with A and B, and a way to have one of the workers' functions spoil what it makes."""
    monkeypatch.chdir(tmp_path)
    for name, values in zip("AB", matrices("float32")[:2], strict=True):
        np.save(f"{name}.npy", values)

    def spoil(kind: str, times: int) -> None:
        client.run(_spoil, kind, times, str(tmp_path))

    yield spoil
    client.run(_mend)


def _spoil(kind: str, times: int, folder: str) -> None:
    import numpy as np

    from distmm import tasks

    real = tasks.multiply

    def flipped(block: np.ndarray) -> np.ndarray:
        for n in range(times):
            try:
                os.close(os.open(f"{folder}/flip.{n}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            block = np.array(block, order="C")
            block.view("u4")[3, 4] ^= np.uint32(1 << 28)
            return block
        return block

    def multiply(where: Any, choice: Any, c: Any, a: list[Any], b: list[Any], *rest: Any) -> Any:
        if kind == "transfer" and where.grid.owner(where.i, where.step) != where.rank:
            a = [flipped(a[0]), *a[1:]]  # a copy that came from its home with one bit changed
        out = real(where, choice, c, a, b, *rest)
        return flipped(out) if kind == "product" and (where.i, where.j, where.step) == (1, 2, 1) else out

    tasks.real_multiply = real  # type: ignore[attr-defined]
    tasks.multiply = multiply


def _mend() -> None:
    from distmm import tasks

    if hasattr(tasks, "real_multiply"):
        tasks.multiply = tasks.real_multiply
        del tasks.real_multiply


def run(client: Client, **options: Any) -> job.Summary:
    return job.multiply("A.npy", "B.npy", "C.npy", client=client, plan="g2x2x1 b20x100x20 p1 w1 l2", **options)


@pytest.mark.parametrize("kind", ["product", "transfer"])
def test_a_flipped_bit_costs_one_block_that_another_worker_makes_again(kind: str, client: Client, spoilt: Any) -> None:
    spoilt(kind, 1)
    summary = run(client)
    assert os.path.exists("flip.0")
    assert summary.recomputed == 1
    np.testing.assert_allclose(np.load("C.npy"), matrices("float32")[2], rtol=1e-3, atol=1e-3)
    certificate = json.loads(Path("C.npy.certificate.json").read_text())
    assert certificate["rejected"] == 1
    assert [block["attempt"] for block in certificate["done"]].count(1) == 1
    assert job.status("C.npy").rejected == 1
    events = [event["event"] for _, event in client.get_events(job.loop.TOPIC)]
    events = events[len(events) - events[::-1].index("begin") :]  # those of this job
    assert events.count("certificate-failure") == 1
    assert events.count("certified") == len(certificate["done"])


def test_a_block_that_stays_wrong_is_not_written(client: Client, spoilt: Any) -> None:
    spoilt("product", 99)
    with pytest.raises(
        WrongResultError, match=r"block C\[1, 2\] is \S+ times its bound off.*same bits on other workers.*kept"
    ):
        run(client)
    assert not os.path.exists("C.npy")
    client.run(_mend)
    assert job.resume("C.npy", client=client).kept > 0
    np.testing.assert_allclose(np.load("C.npy"), matrices("float32")[2], rtol=1e-3, atol=1e-3)


def test_blocks_with_inf_and_nan_are_confirmed_by_another_worker(client: Client, spoilt: Any) -> None:
    a = np.load("A.npy")
    a[25, 7] = np.nan
    np.save("A.npy", a)
    summary = run(client)
    certificate = json.loads(Path("C.npy.certificate.json").read_text())
    assert certificate["judged"] == {"sketch": 8, "same bits on two workers": 4}
    assert summary.recomputed == 4
    assert np.isnan(np.load("C.npy")[25]).all()


@pytest.mark.parametrize("out", ["C.npy", "C.zarr"])
def test_a_flipped_bit_on_the_disk_is_found_later(out: str, client: Client, spoilt: Any) -> None:
    job.multiply("A.npy", "B.npy", out, client=client, blocks=(20, 100, 20))
    assert job.recheck(out).ok
    verdict = job.recheck(out, client)
    assert verdict.ok
    assert "all 12 blocks are what was written; C agrees with A @ B" in verdict.message
    path = Path(out) if out == "C.npy" else Path(out) / "c" / "2" / "3"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for where in (client, None):
        assert "C[2, 3]: its checksum is" in job.recheck(out, where).message


def test_what_cannot_be_multiplied_again_is_said(client: Client, spoilt: Any) -> None:
    run(client)
    os.utime("A.npy")
    verdict = job.recheck("C.npy")
    assert verdict.ok
    assert "A or B has changed since (A: modified_ns was" in verdict.message
    assert open_matrix("C.npy").shape == (M, N)
