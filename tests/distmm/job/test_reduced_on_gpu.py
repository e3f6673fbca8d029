"""Reduced products on a GPU: blocks are judged and reduced there, and only what is kept goes to host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr

from distmm import clusters, job


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int8"])
def test_jobs_on_a_gpu_keep_what_numpy_keeps(name: str, tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda")
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    rng = np.random.default_rng(0)
    # Sums of whole numbers that every type holds exactly.
    a, b = (rng.integers(-1, 2, shape) for shape in ((700, 60), (60, 900)))
    c = a @ b
    paths = tmp_path / "A.zarr", tmp_path / "B.zarr"
    with clusters.local(device="gpu", dashboard=":0") as client:
        from distmm.storage import create_output

        for path, values in zip(paths, (a, b), strict=True):
            target = create_output(path, values.shape, dtype, values.shape)
            target[:, :] = values.astype(dtype)
            target.output.commit()
        options: dict[str, Any] = {"client": client, "device": "gpu", "blocks": (200, 60, 200)}
        job.topk(*paths, 9, tmp_path / "top.zarr", **options)
        kept = job.threshold(*paths, 12, tmp_path / "above.zarr", **options)
        verdicts = [job.recheck(tmp_path / each, client) for each in ("top.zarr", "above.zarr")]
    best = np.argsort(-c, axis=1, kind="stable")[:, :9]
    top, above = (zarr.open_group(tmp_path / each, mode="r") for each in ("top.zarr", "above.zarr"))
    np.testing.assert_array_equal(np.asarray(top["indices"]), best)
    np.testing.assert_array_equal(np.asarray(top["values"]), np.take_along_axis(c, best, axis=1))
    np.testing.assert_array_equal(np.asarray(above["columns"]), np.nonzero(c >= 12)[1])
    assert kept.entries == np.count_nonzero(c >= 12) > 100
    assert [verdict.outcome for verdict in verdicts] == ["right", "right"]


@pytest.mark.gpu
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_neighbours_on_a_gpu_are_numpys(metric: Any, tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda")
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((500, 40)).astype("f4"), rng.standard_normal((600, 40)).astype("f4")
    np.save(tmp_path / "X.npy", x)
    np.save(tmp_path / "Y.npy", y)
    with clusters.local(device="gpu", dashboard=":0") as client:
        job.topk(
            tmp_path / "X.npy", tmp_path / "Y.npy", 5, tmp_path / "near.zarr", metric=metric, transb=True,
            client=client, device="gpu", blocks=(200, 20, 200),
        )  # fmt: skip
    wide = x.astype("f8") @ y.T.astype("f8")
    if metric == "cosine":
        expected = -np.sort(-wide / np.outer(*(np.linalg.norm(z.astype("f8"), axis=1) for z in (x, y))), axis=1)
    else:
        expected = np.sort(np.sqrt(((x[:, None].astype("f8") - y[None]) ** 2).sum(-1)), axis=1)
    found = np.asarray(zarr.open_group(tmp_path / "near.zarr", mode="r")["values"])
    np.testing.assert_allclose(found, expected[:, :5], rtol=1e-4, atol=1e-5)
