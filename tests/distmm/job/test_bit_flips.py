"""A bit that flips in an input on its way between workers, or in a worker's memory, gives no wrong C."""

from __future__ import annotations

import ctypes
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.comm import tcp

import distmm
from distmm import job
from distmm.checking import checksum
from distmm.job import computation, wave_graph
from distmm.job.writer import Writer
from distmm.transfer import loaded_blocks
from distmm.transfer.crc32c import crc32c
from distmm.worker.tasks import products
from tests.tables import later

SIZE = 60
BLOCKS = (20, 30, 20)
PLAN = "g2x1x1 b20x30x20 p1 w1 l2"  # all of C in one wave; B[0, j] is loaded by worker 0, and sent to worker 1

# A sign, the highest bit of an exponent, that of a fraction; of integers the highest and the lowest.
# `checking/test_sketch.py` has more of them.
BITS = [("float32", 31), ("float32", 30), ("float64", 51), ("int32", 31), ("int8", 0)]

FLIPPED = Path("flipped")

Flip = Callable[[np.ndarray], bool]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers in this process that send each other blocks by TCP."""
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def flip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Flip]:
    """A way to flip a bit of the largest element of the first block that comes, in its memory.

    A file notes that it has come: the functions travel with the tasks, and each task has a copy of what they know.
    """
    monkeypatch.chdir(tmp_path)

    def once(bit: int) -> Flip:
        def flips(block: np.ndarray) -> bool:
            try:
                FLIPPED.touch(exist_ok=False)
            except FileExistsError:
                return False
            at = np.unravel_index(np.argmax(abs(block.astype("f8"))), block.shape)
            offset = sum(i * stride for i, stride in zip(at, block.strides, strict=True))
            byte = ctypes.c_uint8.from_address(block.ctypes.data + int(offset) + bit // 8)
            byte.value ^= 1 << bit % 8
            return True

        return flips

    return once


def operands(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write A and B; return them and their product."""
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((SIZE, SIZE)) for _ in "AB")
    if np.dtype(dtype).kind == "i":
        a, b = 40 * a, 40 * b
    a, b = a.astype(dtype), b.astype(dtype)
    np.save("A.npy", a)
    np.save("B.npy", b)
    return a, b, a @ b


def run(client: Client, expected: np.ndarray, out: str = "C.npy", **how: Any) -> tuple[job.Summary, dict[str, Any]]:
    """Multiply, see that C is right, and return what is said of it."""
    summary = job.multiply("A.npy", "B.npy", out, client=client, plan=PLAN, seed=1, **how)
    np.testing.assert_allclose(distmm.storage.open_matrix(out)[:, :], expected, rtol=1e-4, atol=1e-4)
    return summary, json.loads(Path(f"{out}.certificate.json").read_text())


def install(multiply: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiply", multiply)


def on_the_wire(flips: Flip, nbytes: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit of the first frame of so many bytes that comes by TCP."""
    real = tcp.from_frames

    async def from_frames(frames: list[Any], **how: Any) -> Any:
        for frame in frames:
            if memoryview(frame).nbytes == nbytes:
                flips(np.frombuffer(frame, dtype))
        return await real(frames, **how)

    monkeypatch.setattr(tcp, "from_frames", from_frames)


def test_each_block_is_summed_when_it_is_loaded_and_once_more(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *_, expected = operands("float64")
    summed: Counter[str] = Counter()
    for module in (loaded_blocks, checksum):

        def counted(data: np.ndarray, *before: int, name: str = module.__name__) -> int:
            summed[name] += data.nbytes == BLOCKS[0] * BLOCKS[1] * 8
            return crc32c(data, *before)

        monkeypatch.setattr(module, "crc32c", counted)
    run(client, expected)
    blocks = (SIZE // BLOCKS[0] + SIZE // BLOCKS[2]) * SIZE // BLOCKS[1]  # of A and B, which have the same size
    assert summed == {module.__name__: blocks for module in (loaded_blocks, checksum)}


def test_a_block_that_changes_on_the_wire_is_sent_again(
    client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, expected = operands("float64")
    flips = flip(52)
    on_the_wire(flips, BLOCKS[1] * BLOCKS[2] * 8, "float64", monkeypatch)
    summary, _ = run(client, expected)
    assert FLIPPED.exists()
    assert summary.recomputed == 0


def test_so_it_is_in_a_product_without_a_check(
    client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, expected = operands("float32")
    a, b = (np.load(f"{name}.npy", mmap_mode="r") for name in "AB")
    flips = flip(30)
    on_the_wire(flips, BLOCKS[1] * BLOCKS[2] * 4, "float32", monkeypatch)
    with client.as_current():
        c = distmm.matmul(a, b, plan=PLAN).compute()
    assert FLIPPED.exists()
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "bit"), later(BITS, first=2))
def test_a_block_that_changes_in_the_memory_of_the_worker_that_multiplies_is_found(
    dtype: str, bit: int, client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _, _, expected = operands(dtype)
    flips, real = flip(bit), products.multiply

    def multiply(where: Any, choice: Any, c: Any, a_blocks: Any, b_blocks: Any, *rest: Any, **how: Any) -> Any:
        if where.i % 2 == 1 and where.step == 0:  # worker 1
            flips(b_blocks[0])
        return real(where, choice, c, a_blocks, b_blocks, *rest, **how)

    install(multiply, monkeypatch)
    summary, certificate = run(client, expected)
    assert FLIPPED.exists()
    assert summary.recomputed == certificate["rejected"] > 0
    named = re.findall(r"C\[\d+, \d+\] .* worker (\d) of .* It is computed again", caplog.text)
    assert named == ["1"] * summary.recomputed


@pytest.mark.parametrize(
    ("operand", "dtype", "bit", "how"),
    later([("A", "float32", 30, {}), ("B", "int32", 31, {}), ("B", "float64", 52, {"transa": True, "transb": True})]),
)
def test_a_block_that_changes_before_it_is_sketched_is_found(
    operand: str, dtype: str, bit: int, how: dict[str, Any], client: Client, flip: Callable[[int], Flip],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Sketch and product are made from the same wrong block, and agree."""
    a, b, expected = operands(dtype)
    flips, name = flip(bit), f"_of_{operand.lower()}"
    real = getattr(wave_graph, name)

    def sketches(where: Any, order: Any, *args: Any) -> Any:
        flips(args[0][0] if operand == "B" else args[1])
        return real(where, order, *args)

    monkeypatch.setattr(wave_graph, name, sketches)
    summary, certificate = run(client, (a.T @ b.T) if how else expected, **how)
    assert FLIPPED.exists()
    assert summary.recomputed == certificate["rejected"] > 0


def test_a_block_of_c0_that_changes_in_memory_is_found(
    client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, product = operands("float64")
    c0 = np.random.default_rng(9).standard_normal((SIZE, SIZE))
    np.save("C0.npy", c0)
    flips, real = flip(52), products.multiply

    def multiply(*args: Any, **how: Any) -> Any:
        if isinstance(args[-1], np.ndarray) and len(args) == 7:
            flips(args[-1])
        return real(*args, **how)

    install(multiply, monkeypatch)
    summary, certificate = run(client, product + 2 * c0, c="C0.npy", beta=2)
    assert FLIPPED.exists()
    assert summary.recomputed == certificate["rejected"] == 1


@pytest.mark.parametrize("out", ["C.npy", "C.zarr"])
def test_a_block_of_c_that_changes_after_it_was_judged_gets_no_marker(
    client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    _, _, expected = operands("float32")
    flips, real = flip(30), Writer._written

    def written(self: Writer, unit: Any, arrays: dict[str, np.ndarray], record: Any) -> dict[str, Any]:
        flips(arrays["C"])
        return real(self, unit, arrays, record)

    monkeypatch.setattr(Writer, "_written", written)
    summary, certificate = run(client, expected, out)
    assert summary.recomputed == certificate["rejected"] == 1


@pytest.mark.minutes
def test_rows_of_a_reduced_product_are_made_again_too(
    client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, expected = operands("float64")
    flips, real = flip(62), wave_graph._of_a

    def of_a(where: Any, order: Any, *args: Any) -> Any:
        flips(args[1])
        return real(where, order, *args)

    monkeypatch.setattr(wave_graph, "_of_a", of_a)
    summary = job.topk("A.npy", "B.npy", 3, "best.zarr", client=client, plan=PLAN)
    assert summary.recomputed > 0
    found = distmm.storage.open_matrix("best.zarr/values")[...]
    np.testing.assert_allclose(found, -np.sort(-expected, axis=1)[:, :3])


@pytest.mark.minutes
def test_memory_that_changes_again_and_again_names_its_worker(
    client: Client, flip: Callable[[int], Flip], monkeypatch: pytest.MonkeyPatch
) -> None:
    operands("float64")
    flips, real = flip(62), wave_graph._of_a

    def of_a(where: Any, order: Any, *args: Any) -> Any:
        if (where.i, where.j) == (0, 0):
            flips(args[1])
            FLIPPED.unlink()
        return real(where, order, *args)

    monkeypatch.setattr(wave_graph, "_of_a", of_a)
    message = r"A\[0, 0\] changed in the memory of worker [01] of .* after it was loaded, after 3 attempts"
    with pytest.raises(distmm.WrongResultError, match=message):
        job.multiply("A.npy", "B.npy", "C.npy", client=client, plan=PLAN)
    assert computation.ATTEMPTS == 3
