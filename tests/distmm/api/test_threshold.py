"""Elements above a threshold, and near pairs of rows: those of NumPy, for any blocks, workers and waves."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm import DoesNotFitError
from distmm.product import thresholds
from tests.distmm.api.reduced import TEXTS, operands
from tests.tables import later
from tests.until import until


@pytest.mark.parametrize("text", ["split k", "waves", "no cluster"])
def test_a_threshold_keeps_what_reaches_it_in_the_order_of_rows(client: Client, text: str) -> None:
    a, b = operands()
    b[3, 3] = np.nan
    C = a @ b
    rows, columns = np.nonzero(C >= 9)
    with_cluster = None if text == "no cluster" else client
    found = distmm.threshold(a, b, 9, plan=TEXTS.get(text, TEXTS["waves"]), client=with_cluster)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.columns, columns)
    np.testing.assert_array_equal(found.values, C[rows, columns])
    assert found.shape == C.shape
    assert found.values.dtype == C.dtype


def test_a_threshold_of_a_product_with_itself_keeps_one_of_each_pair(client: Client) -> None:
    a, _ = operands()
    rows, columns = np.nonzero(np.tril(a @ a.T) >= 20)
    found = distmm.threshold(a, None, 20, plan="g2x1x1 b16x10x16 p1 w2 l2", client=client)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.columns, columns)


@pytest.mark.parametrize("metric", later(["inner", "cosine", "euclidean"]))
@pytest.mark.parametrize("text", ["waves", "no cluster", "itself"])
def test_a_threshold_of_a_metric_keeps_near_pairs_of_rows(client: Client, metric: Any, text: str) -> None:
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((34, 20)), rng.standard_normal((40, 20))
    itself = text == "itself"
    wide, t = x if itself else y, {"inner": 4.0, "cosine": 0.25, "euclidean": 5.5}[metric]
    inner = x @ wide.T
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(wide, axis=1)
    distances = np.linalg.norm(x[:, None] - wide, axis=-1)
    truth = {"inner": inner, "cosine": inner / lengths, "euclidean": distances}[metric]
    near = truth <= t if metric == "euclidean" else truth >= t
    rows, columns = np.nonzero(np.tril(near) if itself else near)
    plan = "g2x1x1 b16x10x16 p1 w2 l2" if itself else TEXTS["waves"]
    options: dict[str, Any] = {"plan": plan, "client": None if text == "no cluster" else client}
    if itself:
        found = distmm.threshold(x, None, t, metric=metric, **options)
    elif text == "waves":
        found = distmm.threshold(x, y, t, metric=metric, transb=True, **options)
    else:
        found = distmm.threshold(x.T, da.from_array(y.T, chunks=(10, 16)), t, metric=metric, transa=True)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.columns, columns)
    np.testing.assert_allclose(found.values, truth[rows, columns], rtol=1e-7, atol=1e-6)
    assert len(rows) > 20


def test_a_threshold_that_nothing_reaches_keeps_nothing(client: Client) -> None:
    a, b = operands()
    found = distmm.threshold(a, b, 1e6, plan=TEXTS["waves"], client=client)
    assert [len(each) for each in found[:3]] == [0, 0, 0]
    assert [each.dtype for each in found[:3]] == ["i8", "i8", "f4"]


@pytest.mark.parametrize("local", [True, False])
def test_a_threshold_that_keeps_too_much_is_refused_with_the_count_so_far(client: Client, local: bool) -> None:
    a, b = operands()
    kept = int((a @ b >= 0).sum())
    before = set(client.run_on_scheduler(products_left))  # of other tests, whose futures are not collected yet
    with pytest.raises(
        DoesNotFitError, match=r"keeps [\d,]+ of the [\d,]+ elements seen so far, of 1,360, and at most"
    ) as e:
        distmm.threshold(a, b, 0, most=100, plan=TEXTS["waves"], client=None if local else client)
    counted = int(str(e.value).split()[3].replace(",", ""))
    assert 100 < counted <= kept
    until(lambda: before.issuperset(client.run_on_scheduler(products_left)))


def test_a_block_that_is_kept_nearly_whole_comes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "ALWAYS", 0)
    with pytest.raises(DoesNotFitError, match="those of one block, 4,096 of 4,096, would take more than a quarter"):
        distmm.threshold(np.zeros((64, 8)), np.zeros((8, 64)), 0, plan="g1x1x1 b64x8x64 p1 w1 l2")


def products_left(dask_scheduler: Any) -> list[str]:
    plugin = dask_scheduler.plugins.get("distmm-placement")
    return list(plugin.products.products) if plugin else []  # none before the first call with a client
