"""The situations of `situations.py`: what is multiplied, by distmm and by what one would use instead.

A situation yields names of products and their contestants, which are functions that return when the result is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
from dask.distributed import Client, LocalCluster, wait

import distmm
from distmm import clusters

Products = Iterator[tuple[str, Mapping[str, Callable[[], Any]]]]


@dataclass(frozen=True)
class Setting:
    """Where a situation runs: device, workers (None: all), how the user starts the cluster, rounds, scale, seconds."""

    device: Literal["cpu", "gpu"]
    workers: int | None
    cluster: str
    turns: int
    scale: float
    seconds: float

    def size(self, n: int, step: int = 16) -> int:
        """Return an edge of a matrix, scaled, as a multiple of a step."""
        return max(step, round(n * self.scale / step) * step)

    @property
    def module(self) -> Any:
        """CuPy on GPUs, else NumPy."""
        if self.device == "cpu":
            return np
        import cupy

        return cupy

    def normal(self, shape: tuple[int, ...], chunks: Any) -> da.Array:
        """Return a persisted float32 array of normally distributed numbers, in the workers' memory."""
        random = da.random.RandomState(0, RandomState=self.module.random.RandomState)
        made = random.standard_normal(shape, chunks=chunks).astype("f4").persist()
        wait(made)
        return made

    @contextmanager
    def started(self) -> Iterator[Client]:
        """Start a cluster the way the user does."""
        if self.cluster == "own":
            with clusters.local(self.device, workers=self.workers, dashboard=None, quiet=True) as client:
                yield client
            return
        if self.device == "cpu":
            cluster = LocalCluster(n_workers=self.workers or 4, threads_per_worker=1, dashboard_address=":0")
        else:
            from dask_cuda import LocalCUDACluster

            pool = {"protocol": "ucx", "rmm_pool_size": 0.6} if self.cluster == "ucx" else {}
            cluster = LocalCUDACluster(n_workers=self.workers, dashboard_address=":0", **pool)
        with cluster, Client(cluster) as client:
            yield client


def numbers(shape: tuple[int, ...], dtype: str = "f4", seed: int = 0) -> np.ndarray:
    """Return normally distributed numbers in this process's memory."""
    random = np.random.default_rng(seed)
    real = random.standard_normal(shape, dtype="f4")
    return (real + 1j * random.standard_normal(shape, dtype="f4")).astype(dtype) if "c" in dtype else real.astype(dtype)


def tall(setting: Setting) -> Products:
    """A tall array that is persisted by rows."""
    rows, width = setting.size(1_000_000), setting.size(2048)
    with setting.started():
        X = setting.normal((rows, width), (-(-rows // 16), width))
        W, v = setting.normal((width, width // 8), -1), setting.normal((width,), -1)
        yield "X.T @ X", {"distmm": lambda: distmm.matmul(X.T, X).compute(), "Dask": lambda: (X.T @ X).compute()}
        yield "gram", {"distmm": lambda: distmm.gram(X.T).compute(), "Dask": lambda: (X.T @ X).compute()}
        yield (
            "sum X @ W",
            {
                "distmm": lambda: distmm.matmul(X, W).sum().compute(),
                "Dask": lambda: (X @ W).sum().compute(),
            },
        )
        yield "X @ v", {"distmm": lambda: distmm.matmul(X, v).compute(), "Dask": lambda: (X @ v).compute()}
        yield "cov", {"distmm": lambda: distmm.cov(X.T).compute(), "Dask": lambda: da.cov(X.T).compute()}


def accelerated(compute: Callable[[], Any]) -> Any:
    """Compute with Dask's own operators, which distmm replaces meanwhile."""
    with distmm.accelerated():
        return compute()


def svd(setting: Setting) -> Products:
    """A randomised SVD with Dask's own function."""
    rows, width = setting.size(1_000_000), setting.size(2048)
    with setting.started():
        X = setting.normal((rows, width), (-(-rows // 16), width))

        def decomposed() -> Any:
            seed = da.random.RandomState(0, RandomState=setting.module.random.RandomState)
            return da.linalg.svd_compressed(X, 64, n_power_iter=2, seed=seed)

        def sums() -> Any:
            return [part.sum().compute() for part in decomposed()[:2]]

        def fetched() -> Any:
            return dask.compute(*decomposed())

        yield "svd_compressed, sums", {"distmm": partial(accelerated, sums), "Dask": sums}
        yield "svd_compressed, fetched", {"distmm": partial(accelerated, fetched), "Dask": fetched}


def total(multiply: Callable[..., da.Array], A: da.Array, B: da.Array) -> None:
    """Compute the sum of a product, so that all of C is made and none of it is sent."""
    multiply(A, B).sum().compute()


def chunks(setting: Setting) -> Products:
    """Square products of arrays that are persisted where Dask put them, and of NumPy arrays in many small chunks."""

    def contestants(A: da.Array, B: da.Array) -> dict[str, Callable[[], Any]]:
        return {"distmm": partial(total, distmm.matmul, A, B), "Dask": partial(total, da.matmul, A, B)}

    n = setting.size(16384)
    with setting.started():
        for chunk in (2048, 8192):
            A, B = (setting.normal((n, n), setting.size(chunk)) for _ in range(2))
            yield f"n = {n}, chunks of {chunk}", contestants(A, B)
        n, chunk = setting.size(4096), setting.size(256)
        A, B = (da.from_array(numbers((n, n), seed=seed), chunks=chunk) for seed in (0, 1))
        yield f"n = {n}, NumPy in chunks of {chunk}", contestants(A, B)


def computed(A: Any) -> Any:
    """Return A @ A as a user without `out=` computes it."""
    return distmm.matmul(A, A).compute()


def there_and_back(setting: Setting, A: np.ndarray) -> Any:
    """Return A @ A by NumPy, or by CuPy with copies to the GPU and back."""
    if setting.device == "cpu":
        return A @ A
    on_gpu = setting.module.asarray(A)
    return setting.module.asnumpy(on_gpu @ on_gpu)


def small(setting: Setting) -> Products:
    """NumPy arrays of the client, on a cluster: pageable, and of `distmm.empty`."""
    with setting.started():
        for edge in (256, 1024, 4096, 16384):
            n = setting.size(edge)
            A, C = numbers((n, n)), np.empty((n, n), "f4")
            peer = {setting.module.__name__: partial(there_and_back, setting, A)}
            yield f"NumPy out=, n = {n}", {"distmm": partial(distmm.matmul, A, A, out=C), **peer}
            theirs = {"dask.compute()": lambda A=A: dask.compute(distmm.matmul(A, A))}
            yield f"NumPy compute(), n = {n}", {"distmm": partial(computed, A), **peer, **theirs}
        pinned, C = distmm.empty((n, n), "f4"), distmm.empty((n, n), "f4")
        pinned[:] = A
        yield f"distmm.empty out=, n = {n}", {"distmm": partial(distmm.matmul, pinned, pinned, out=C), **peer}


def ended(setting: Setting, multiply: Callable[..., Any], *operands: Any, **options: Any) -> None:
    """Multiply, and wait for the GPU."""
    multiply(*operands, **options)
    if setting.device == "gpu":
        setting.module.cuda.Device().synchronize()


def _of_frameworks(setting: Setting) -> Products:
    xp = setting.module
    for edge in (1024, 4096, 8192, 16384):
        n = setting.size(edge)
        A = xp.asarray(numbers((n, n)))
        contestants = {"distmm": partial(ended, setting, computed, A)}
        yield f"{xp.__name__}, n = {n}", {**contestants, xp.__name__: partial(ended, setting, xp.matmul, A, A)}
        if setting.device == "gpu":
            import torch

            for dtype in (torch.float32, torch.bfloat16):
                T = torch.as_tensor(A, device="cuda").to(dtype)
                out = torch.empty_like(T)
                yield (
                    f"{dtype} out=, n = {n}",
                    {
                        "distmm": partial(ended, setting, distmm.matmul, T, T, out=out),
                        "torch": partial(ended, setting, torch.mm, T, T, out=out),
                    },
                )


def client_arrays(setting: Setting) -> Products:
    """Arrays of the client's process, on a GPU where there is one, with a cluster."""
    with setting.started():
        yield from _of_frameworks(setting)


def alone(setting: Setting) -> Products:
    """The same without a cluster."""
    yield from _of_frameworks(setting)


def contraction(setting: Setting) -> Products:
    """An einsum of two complex128 tensors."""
    xp, few, many = setting.module, setting.size(48, 8), setting.size(40, 8)
    tensor, text = numbers((8, few, few, many, many), "c16"), "aijkl,amnkl->ijmn"
    lazy = da.from_array(tensor, chunks="auto")
    on_device = xp.asarray(tensor)
    with setting.started():
        peer = {f"{xp.__name__} alone": lambda: np.asarray(xp.einsum(text, on_device, on_device).sum().item())}
        yield "NumPy", {"distmm": lambda: distmm.einsum(text, tensor, tensor).compute(), **peer}
        yield xp.__name__, {"distmm": lambda: distmm.einsum(text, on_device, on_device).compute(), **peer}
        yield "Dask", {"distmm": lambda: distmm.einsum(text, lazy, lazy).compute(), **peer}


def streams(setting: Setting) -> Products:
    """Reductions of a C that fits nowhere."""
    n = setting.size(200_000)
    with setting.started():
        X = setting.normal((n, 256), (-(-n // 16), 256))
        yield (
            "C.max(axis=1)",
            {
                "distmm": lambda: distmm.matmul(X, X.T).max(axis=1).compute(),
                "Dask": lambda: da.matmul(X, X.T).max(axis=1).compute(),
            },
        )
        yield (
            "da.topk(C, 10)",
            {
                "distmm": lambda: da.topk(distmm.matmul(X, X.T), 10, axis=1).compute(),
                "Dask": lambda: da.topk(da.matmul(X, X.T), 10, axis=1).compute(),
            },
        )


def neighbours(setting: Setting) -> Products:
    """The best of each row of a product of NumPy arrays that fits nowhere."""
    X, Y = (numbers((setting.size(500_000), setting.size(512)), seed=seed) for seed in range(2))
    find = _best_by_torch if setting.device == "gpu" else _best_by_numpy
    peer = "torch" if setting.device == "gpu" else "numpy"
    shape = f"{X.shape[0]} x {X.shape[1]}"
    with setting.started():
        yield (
            f"topk, {shape}, k = 15",
            {"distmm": lambda: distmm.topk(X, Y.T, 15).compute(), peer: lambda: find(X, Y, 15)},
        )
        yield (
            f"nearest, {shape}, cosine, k = 11",
            {
                "distmm": lambda: distmm.nearest(X, X, 11, metric="cosine").compute(),
                peer: lambda: find(X, X, 11, normalised=True),
            },
        )


def _best_by_torch(X: np.ndarray, Y: np.ndarray, k: int, normalised: bool = False) -> Any:
    """Return what a user writes on one GPU: a product for some rows at a time, and `topk` of each."""
    import torch

    left, right = (torch.from_numpy(each).cuda() for each in (X, Y))
    if normalised:
        left, right = (torch.nn.functional.normalize(each) for each in (left, right))
    found = [torch.topk(left[i : i + 16384] @ right.T, k) for i in range(0, len(left), 16384)]
    return torch.cat([each.values for each in found]).cpu(), torch.cat([each.indices for each in found]).cpu()


def _best_by_numpy(X: np.ndarray, Y: np.ndarray, k: int, normalised: bool = False) -> Any:
    """Return the same on CPUs, by `argpartition`."""
    if normalised:
        X, Y = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (X, Y))
    found = []
    for i in range(0, len(X), 1024):
        C = X[i : i + 1024] @ Y.T
        best = np.argpartition(C, -k, axis=1)[:, -k:]
        found.append((np.take_along_axis(C, best, axis=1), best))
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def two_clients(setting: Setting) -> Products:
    """Two clients of one cluster, each with a product of NumPy arrays, at the same time and one after the other."""
    from concurrent.futures import ThreadPoolExecutor

    n = setting.size(8192)
    A, first, second = numbers((n, n)), np.empty((n, n), "f4"), np.empty((n, n), "f4")
    with setting.started() as client, Client(client.scheduler.address, set_as_default=False) as other:
        jobs: list[Callable[[], Any]] = [
            lambda: distmm.matmul(A, A, out=first, client=client),
            lambda: distmm.matmul(A, A, out=second, client=other),
        ]
        with ThreadPoolExecutor(2) as pool:
            yield (
                f"n = {n}",
                {
                    "distmm": lambda: [each.result() for each in [pool.submit(job) for job in jobs]],
                    "one after the other": lambda: [job() for job in jobs],
                },
            )


def cold(setting: Setting) -> Products:
    """The first product of a machine that has no compiled kernels."""
    import os
    import tempfile

    n = setting.size(8192)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DISTMM_CACHE_DIR"] = folder  # before the workers start
        with setting.started():
            A = setting.normal((n, n), n // 2)
            yield (
                f"n = {n} (see its first turns in --json)",
                {
                    "Dask": lambda: da.matmul(A, A).sum().compute(),
                    "distmm": lambda: distmm.matmul(A, A).sum().compute(),
                },
            )
