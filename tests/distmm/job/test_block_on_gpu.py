"""A block of C that a GPU has made is judged there, and copied to the host once."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from distributed import Client

import distmm
from distmm import clusters, job
from distmm.checking import sampled_elements, sketch
from distmm.checking.checksum import checksum
from distmm.graph.placement import Placement
from distmm.job import judge as judges
from distmm.job import wave_graph
from distmm.job.computation import Computation
from distmm.job.contents import Contents
from distmm.job.folder import Folder
from distmm.job.judge import Judge, RowOfA
from distmm.job.lock import Lock, locked
from distmm.job.reduction import Entries, Reduction, Threshold, TopK
from distmm.job.spec import Spec
from distmm.job.writer import Writer
from distmm.storage import open_matrix
from distmm.transfer.counted_writes import CountedRun
from distmm.worker import gpu, gpu_copies
from distmm.worker.tasks import reductions_on_gpu
from distmm.worker.tasks.metrics import NORMED, squared_norms
from distmm_kernels.tolerance import Tolerance
from tests.distmm.checking.sketched import K, M, N, matrices


class Block(np.ndarray):
    """A NumPy array that passes for a CuPy array, and notes the bytes of each copy to the host."""

    to_host: ClassVar[list[int]] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3}

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        self.to_host.append(self.nbytes)
        copy = np.array(self)
        if out is None:
            return copy
        out[...] = copy
        return out


class Cupy(types.ModuleType):
    """NumPy's functions under CuPy's name: they return arrays on the "GPU", and note the bytes of each copy to it."""

    ndarray = Block
    to_device: ClassVar[list[int]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(np, name)

        def on_gpu(*args: Any, **kwargs: Any) -> Any:
            if name == "asarray" and not isinstance(args[0], Block):
                self.to_device.append(args[0].nbytes)
            found = function(*args, **kwargs)
            return found.view(Block) if isinstance(found, np.ndarray) else found

        return on_gpu


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Cupy]]:
    monkeypatch.setitem(sys.modules, "cupy", Cupy("cupy"))
    monkeypatch.setattr(gpu, "working", lambda work: nullcontext())
    for finds in ("largest", "above"):  # kernels do not run on such arrays
        monkeypatch.setattr(reductions_on_gpu, finds, lambda *args: None)

    def sums(words: np.ndarray, odd: np.ndarray, out: np.ndarray, axis: int) -> None:
        out[...] = (words * odd).sum(axis=axis, dtype=np.uint64)

    monkeypatch.setattr("distmm.transfer.row_sums._sums", lambda: sums)
    Block.to_host.clear()
    Cupy.to_device.clear()
    yield Cupy
    Block.to_host.clear()
    Cupy.to_device.clear()


@dataclass
class OneBlock:
    """A job whose C is one block, at the moment when that is made."""

    folder: Path
    a: np.ndarray
    b: np.ndarray
    dtype: np.dtype[Any]
    beta: complex = 0
    tokens: Iterator[int] = field(default_factory=itertools.count)

    def write(self, block: Any, added: np.ndarray | None = None) -> dict[str, Any]:
        """What the writing task says of a block."""
        plan = distmm.plan(self.a, self.b, blocks=(M, K, N))
        on_gpu = replace(plan, cluster=replace(plan.cluster, device="cuda"))
        folder = Folder.of(self.folder / f"C{next(self.tokens)}.zarr").of_job("0" * 16)
        tolerance = Tolerance.of(self.a.dtype, self.b.dtype, self.dtype, K)
        weights = {0: sketch.weigh(self.b, tolerance.sketched)}
        right = [sketch.of_b(self.b, 5, 0, tolerance.sketched, weights[0])]
        row = RowOfA(sketch.of_a(None, self.a, right, tolerance.sketched), np.zeros(2, np.uint64), None, {})
        with locked(folder.path) as lock:
            folder.make()
            contents = Contents(None, self.dtype, (M, N))
            target = contents.create(folder.target, folder, (M, K, N), False)
            judge = Judge(folder.id, contents, on_gpu, tolerance, 5, 1, self.beta, {"C0": (False, False)})
            writer = Writer(folder, CountedRun(lock.token), target, judge)
            judged = judge.judged(Placement("C", (), 0, 0, 0, 0), block, row, 0, added, weights)
            record = writer.write((0, 0), judged)
            assert list(folder.markers()) == [(0, 0)] * record["written"]
            if record["written"]:
                assert checksum(open_matrix(folder.draft)[...]) == record["crc32c"]
            Lock.check(folder.path, lock.token)
        return record


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster: the writing task is called here."""
    monkeypatch.setattr(judges, "get_worker", lambda: types.SimpleNamespace(name="0"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["float32", "float16", "complex64", "int8", "uint64"])
@pytest.mark.parametrize("right", [True, False])
def test_a_block_is_judged_where_it_lies_and_copied_to_the_host_once(
    right: bool, name: str, cupy: type[Cupy], tmp_path: Path
) -> None:
    a, b, c = matrices(name)
    if not right:
        c[17, 30] = c[17, 30] ^ 1 if c.dtype.kind in "iu" else 1000
    record = OneBlock(tmp_path, a, b, c.dtype).write(c.view(Block))
    assert (record["written"], record["crc32c"]) == (right, checksum(c))
    assert record["row"] == 17 or right
    whole = [nbytes for nbytes in Block.to_host if nbytes >= c.nbytes]
    work = Tolerance.of(a.dtype, b.dtype, c.dtype, K).sketched
    vectors = sketch.VECTORS_OF_INTEGERS if c.dtype.kind in "iu" else sketch.VECTORS
    sums = max(8, work.itemsize) * M * vectors
    assert whole == [c.nbytes]
    rows = sampled_elements.EDGE * N * c.itemsize
    assert sum(Block.to_host) <= c.nbytes + 3 * sums + rows  # products with vectors, norms, exponents, some rows of C
    assert sum(cupy.to_device) <= 2 * N * vectors * 8  # vectors


@pytest.mark.usefixtures("alone", "cupy")
def test_a_gpu_reads_the_c_that_is_added_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []

    def uploaded(block: np.ndarray) -> Iterator[Any]:
        for half in np.split(block, 2):
            pieces.append(half.nbytes)
            yield half.copy().view(Block)

    monkeypatch.setattr(gpu_copies, "pieces", uploaded)
    a, b, c = matrices("float32")
    before = matrices("float32", "uniform")[2]
    record = OneBlock(tmp_path, a, b, c.dtype, beta=-2).write((c - 2 * before).view(Block), before)
    assert record["written"]
    assert sum(pieces) == before.nbytes
    (tmp_path / "other").mkdir()
    assert not OneBlock(tmp_path / "other", a, b, c.dtype, beta=-1).write((c - 2 * before).view(Block), before)[
        "written"
    ]


@pytest.mark.usefixtures("alone", "cupy")
@pytest.mark.parametrize("reduction", [TopK(3), TopK(3, "cosine"), Threshold(20.0), Threshold(9.0, "euclidean")])
def test_a_block_that_is_reduced_is_not_copied_to_the_host(reduction: Reduction, tmp_path: Path) -> None:
    a, b, c = matrices("float32")
    plan = distmm.plan(a, b, blocks=(M, K, N))
    tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, K)
    weights = {0: sketch.weigh(b, tolerance.sketched)}
    right = [sketch.of_b(b, 5, 0, tolerance.sketched, weights[0])]
    norms = [squared_norms(a), squared_norms(b.T)] if reduction.metric in NORMED else None
    row = RowOfA(sketch.of_a(None, a, right, tolerance.sketched), np.zeros(2, np.uint64), norms, {})
    judge = Judge("", Contents(reduction, c.dtype, (M, N)), plan, tolerance, 5, 1, 0, {})
    where = Placement("C", (), 0, 0, 0, 0)
    (expected,), on_cpu = judge.judged(where, c, row, 0, None, weights)
    Block.to_host.clear()
    (record,), on_gpu = judge.judged(where, c.view(Block), row, 0, None, weights)
    assert (record["accepted"], expected["accepted"]) == (True, True)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        np.testing.assert_array_equal(one, other)
    assert max(Block.to_host) < c.nbytes
    wrong = c.copy()
    wrong[17, 30] = 1000
    (record,), part = judge.judged(where, wrong.view(Block), row, 0, None, weights)
    assert (record["accepted"], record["row"], part) == (False, 17, None)


@pytest.mark.parametrize(("device", "kind"), [("cuda", "cupy"), ("cpu", "numpy")])
def test_products_of_a_job_leave_their_blocks_where_they_are_made(
    device: Any, kind: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BuiltError(Exception):
        pass

    def build(name: str, plan: Any, a: Any, b: Any, epilogue: Any, *args: Any, **kwargs: Any) -> None:
        raise BuiltError(epilogue.kind)

    a, b, _ = matrices("float32")
    plan = distmm.plan(a, b, blocks=(M, K, N))
    plan = replace(plan, cluster=replace(plan.cluster, device=device))
    writer: Any = types.SimpleNamespace(run=CountedRun())
    entries = Entries(plan)
    made = Computation(client, Spec.of(a, b, None), plan, writer, job.Stop(), lambda figures: None, entries)
    monkeypatch.setattr(wave_graph.product_graph, "build", build)
    with pytest.raises(BuiltError, match=kind):
        made._send((plan.waves[0],), {(0, 0)}, plan, writer)


# On a real GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex128", "int8"])
def test_a_gpu_copies_the_bytes_of_a_block_to_the_host_once(
    name: str, staged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy
    from cupy.cuda import runtime

    to_host: list[int] = []
    to_device: list[int] = []

    class Counted(cupy.ndarray):  # type: ignore[misc]
        """Notes what is copied to the host of this array, and of those that are made of it."""

        def get(self, *args: Any, **kwargs: Any) -> Any:
            to_host.append(self.nbytes)
            return super().get(*args, **kwargs)

    copy = runtime.memcpy2DAsync

    def counted(
        to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        on_device = runtime.pointerGetAttributes(to).type == runtime.memoryTypeDevice
        (to_device if on_device else to_host).append(width * height)
        copy(to, to_pitch, of, of_pitch, width, height, kind, stream)

    monkeypatch.setattr(runtime, "memcpy2DAsync", counted)
    monkeypatch.setattr(gpu_copies, "STAGE", 2000 if staged else 1 << 26)  # bytes: in several pieces, or in one
    monkeypatch.setattr(gpu_copies, "_idle", [])
    a, b, c = matrices(name)
    one = OneBlock(tmp_path, a, b, c.dtype)
    record = one.write(cupy.asarray(c).view(Counted))
    assert (record["written"], record["crc32c"]) == (True, checksum(c))
    sums = 3 * 16 * M * sketch.VECTORS_OF_INTEGERS  # products with vectors, norms and exponents
    assert c.nbytes <= sum(to_host) <= c.nbytes + sums
    assert not to_device


@pytest.mark.gpu
def test_a_job_on_a_gpu_copies_c_to_the_host_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dask_cuda")
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((700, 700)).astype("f4") for _ in "AB")
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)

    def count() -> None:
        from distmm.job import judge
        from distmm.worker import gpu_copies as here

        to_host, pieces = here.to_host, here.pieces
        here.counts = {"fetched": 0, "uploaded": 0}  # type: ignore[attr-defined]

        def fetched(block: Any) -> np.ndarray:
            if block.dtype == "f4":  # sketches and checksums have other types
                here.counts["fetched"] += block.nbytes  # type: ignore[attr-defined]
            return to_host(block)

        def uploaded(block: np.ndarray) -> Iterator[Any]:
            here.counts["uploaded"] += block.nbytes  # type: ignore[attr-defined]
            return pieces(block)

        judge.to_host = here.to_host = fetched
        here.pieces = uploaded  # type: ignore[assignment]

    def counts() -> dict[str, int]:
        from distmm.worker import gpu_copies as here

        return dict(here.counts)  # type: ignore[attr-defined]

    with clusters.local(device="gpu", dashboard=":0") as client:
        client.run(count)
        summary = job.multiply(
            tmp_path / "A.npy", tmp_path / "B.npy", tmp_path / "C.zarr", client=client, device="gpu",
            blocks=(200, 300, 200),
        )  # fmt: skip
        found = list(client.run(counts).values())
    assert summary.recomputed == 0
    np.testing.assert_allclose(open_matrix(tmp_path / "C.zarr")[...], a @ b, rtol=1e-3, atol=1e-2)
    assert sum(one["fetched"] for one in found) == a.nbytes
    assert not any(one["uploaded"] for one in found)
