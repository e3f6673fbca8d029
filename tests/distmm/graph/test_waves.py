"""Products in waves and in layers: the same bits as in one go, and never more than two waves on the cluster."""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from distributed import Client, Scheduler

from distmm import gemm, matmul, plan
from distmm.errors import InputError
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice
from tests.distmm.graph import serial
from tests.exact_sums import in_panels, whole_numbers
from tests.tables import later

F4 = np.dtype("f4")


def operands(m: int = 96, k: int = 160, n: int = 64, depth: int = 32) -> tuple[np.ndarray, np.ndarray]:
    return in_panels(whole_numbers((m, k), "f4"), depth), whole_numbers((k, n), "f4", 1)


def serially(text: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return serial.execute(plan(a, b, plan=text), a, b, KernelChoice("cpu", F4), Epilogue(F4, "numpy"))


@pytest.mark.bits
@pytest.mark.parametrize("waves", later(["w1", "w3x2", "w100x100"]))
def test_waves_fill_out_with_the_bits_of_the_serial_executor(client: Client, waves: str) -> None:
    a, b = operands()
    text = f"g2x2x1 b16x32x16 p2 {waves} l2"
    out = np.full((96, 64), np.nan, "f4")
    assert matmul(a, b, plan=text, out=out, client=client) is out
    np.testing.assert_array_equal(out, serially(text, a, b))


def test_waves_of_batches_are_cut_along_the_first_batch_dimension(client: Client) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.random((4, 3, 20, 30)), rng.random((3, 30, 10))
    text = "g2x2x1 b1x2x16x32x16 p1 w2x1x1 l2"
    p = plan(a, b, plan=text, client=client)
    assert [p.blocking.region(wave)[0] for wave in p.waves] == [slice(0, 2), slice(2, 4)]
    out = np.empty((4, 3, 20, 10))
    matmul(a, b, plan=text, out=out, client=client)
    np.testing.assert_allclose(out, a @ b)


@pytest.mark.minutes
def test_few_waves_are_on_the_cluster_at_a_time(client: Client, tmp_path) -> None:
    a, b = operands()
    text = "g2x2x1 b16x32x16 p1 w3x2 l2"
    out = zarr.create_array(tmp_path / "c.zarr", shape=(96, 64), chunks=(16, 16), dtype="f4")

    def watch(dask_scheduler: Scheduler) -> None:
        plugin = dask_scheduler.plugins["distmm-placement"]
        plugin.most, add = 0, plugin.update_graph
        others = set(dask_scheduler.tasks)  # of tests before this one

        def update_graph(*args, **kwargs):
            add(*args, **kwargs)
            own = dask_scheduler.tasks.keys() - others
            plugin.most = max(plugin.most, sum(str(key[0]).startswith("distmm-") for key in own))

        plugin.update_graph = update_graph

    def unwatch(dask_scheduler: Scheduler) -> int:
        plugin = dask_scheduler.plugins["distmm-placement"]
        del plugin.update_graph
        return plugin.most

    whole = plan(a, b, plan=text, client=client)
    client.run_on_scheduler(watch)
    try:
        matmul(a, b, plan=text, out=out, client=client)
    finally:
        most = client.run_on_scheduler(unwatch)
    np.testing.assert_array_equal(out[:], serially(text, a, b))
    assert len(whole.waves) == 6
    a_wave = 20 + 20  # products, and loads of two rows and two columns of blocks
    assert 0 < most <= 3 * a_wave  # the last one's keys may not have been forgotten yet


@pytest.mark.bits
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_split_k_has_the_bits_of_its_tree_whatever_the_number_of_workers(client: Client, layers: int) -> None:
    a, b = operands(m=32, k=512, n=32)
    text = f"g1x1x{layers} b32x32x32 p2 w1 l2"
    expected = serially(text, a, b)
    np.testing.assert_array_equal(client.compute(matmul(a, b, plan=text, client=client), sync=True), expected)
    np.testing.assert_array_equal(matmul(a, b, plan=text).compute(scheduler="synchronous"), expected)
    np.testing.assert_allclose(expected, a @ b, atol=1e-5 * np.abs(expected).max())


def test_layers_apply_the_epilogue_once(client: Client) -> None:
    a, b = operands(m=32, k=512, n=32)
    c = np.random.default_rng(5).random((32, 32), dtype="f4")
    product = gemm(2, a, b, 3, c, plan="g1x1x4 b32x32x32 p1 w1 l2", client=client)
    np.testing.assert_allclose(client.compute(product, sync=True), 2 * (a @ b) + 3 * c, atol=1e-5 * np.abs(a @ b).max())


def test_a_small_c_and_a_long_k_use_all_workers(client: Client) -> None:
    a, b = np.zeros((64, 1 << 20), "f4"), np.zeros((1 << 20, 64), "f4")
    p = plan(a, b, client=client)
    assert p.grid.layers > 1
    assert p.peak.worker > 0


def test_a_plans_text_is_refused_for_a_product_of_other_dimensions() -> None:
    a, b = operands()
    with pytest.raises(InputError, match="grid, block edges"):
        matmul(a, b, plan="g1x1x1 b4x8x8x8 p1 w1 l2")


def test_matrices_for_tests_of_bits_show_the_order_of_panels_and_no_other() -> None:
    a, b = (x.astype("f8") for x in operands(m=16, k=96, n=16))
    panels = [(a[:, p : p + 32], b[p : p + 32]) for p in range(0, 96, 32)]
    exact = [x.astype("f4") @ y.astype("f4") for x, y in panels]
    for (x, y), product in zip(panels, exact, strict=True):
        np.testing.assert_array_equal(product, x @ y)
    forwards, backwards = (first + second + third for first, second, third in (exact, exact[::-1]))
    assert (forwards != backwards).any()
