from __future__ import annotations

import pickle
import re

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from distmm import DoesNotFitError, InputError, gemm, gram, matmul, plan
from tests.tables import number_of

pytestmark = pytest.mark.usefixtures("synchronous")


def random(shape: tuple[int, ...], dtype: str = "f8", seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape) * 30
    return (
        (x + 1j * x[::-1]).astype(dtype)
        if np.dtype(dtype).kind == "c" and shape
        else x.astype("i8" if dtype in "?bBhHiIlLqQ" else "f8").astype(dtype)
    )


@settings(max_examples=number_of(60))
@given(
    mutually_broadcastable_shapes(signature="(m,k),(k,n)->(m,n)", max_side=5, min_side=0, max_dims=2), st.integers(1, 3)
)
def test_shapes_follow_numpy(shapes: object, chunk: int) -> None:
    a, b = (random(s, seed=i) for i, s in enumerate(shapes.input_shapes))
    c = matmul(da.from_array(a, chunks=chunk), da.from_array(b, chunks=chunk))
    assert c.shape == shapes.result_shape
    np.testing.assert_allclose(c.compute(), a @ b, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("sa", "sb"), [((7,), (7, 3)), ((5, 7), (7,)), ((7,), (7,)), ((7,), (2, 7, 3)), ((2, 5, 7), (7,))]
)
def test_vectors_follow_numpy(sa: tuple[int, ...], sb: tuple[int, ...]) -> None:
    a, b = random(sa), random(sb, seed=1)
    for A, B in [(a, b), (da.from_array(a, chunks=2), da.from_array(b, chunks=2))]:
        c = matmul(A, B)
        assert c.shape == (a @ b).shape
        made = c.compute()
        assert type(made) is type(a @ b)
        np.testing.assert_allclose(made, a @ b, rtol=1e-12)


@pytest.mark.parametrize("left", list("?bBiIlQefdFD"))
@pytest.mark.parametrize("right", list("?hQedD"))
def test_result_types_and_integer_bits_follow_numpy(left: str, right: str) -> None:
    a, b = random((9, 14), left), random((14, 5), right, seed=1)
    with np.errstate(over="ignore"):
        expected = a @ b
    c = matmul(da.from_array(a, chunks=4), da.from_array(b, chunks=4))
    value = c.compute()
    assert c.dtype == value.dtype == expected.dtype
    if expected.dtype.kind in "?biu":
        np.testing.assert_array_equal(value, expected)
    else:
        np.testing.assert_allclose(value, expected, rtol=2e-2 if expected.dtype == np.float16 else 1e-4, atol=1e-2)


def test_float16_accumulates_in_float32_over_all_of_k() -> None:
    a, b = np.ones((1, 5000), "f2"), np.ones((5000, 1), "f2")
    # Summed in float16, chunk by chunk, 2048 + 1 would stay 2048.
    assert matmul(da.from_array(a, chunks=(1, 1)), da.from_array(b, chunks=(1, 1))).compute() == 5000


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_local_schedulers_compute_it(scheduler: str) -> None:
    a, b = random((50, 60)), random((60, 40), seed=1)
    c = matmul(da.from_array(a, chunks=16), da.from_array(b, chunks=(16, 11)))
    np.testing.assert_allclose(c.compute(scheduler=scheduler), a @ b)
    np.testing.assert_allclose((c + 1).sum().compute(scheduler=scheduler), (a @ b + 1).sum())


def test_nothing_is_computed_before_it_is_asked_for() -> None:
    def fail(block: np.ndarray) -> np.ndarray:
        raise AssertionError("computed")

    A = da.ones((10, 10), chunks=5).map_blocks(fail, meta=np.empty((0, 0)))
    assert matmul(A, A).shape == (10, 10)


def test_chunks_of_both_operands_become_those_of_c() -> None:
    A, B = da.ones((10, 12), chunks=((3, 7), (5, 7))), da.ones((12, 9), chunks=((4, 8), (2, 2, 5)))
    C = matmul(A, B)
    assert C.chunks == ((3, 7), (2, 2, 5))
    np.testing.assert_array_equal(C.compute(), np.full((10, 9), 12.0))


def test_transposed_views_are_multiplied() -> None:
    a = random((40, 30))
    A = da.from_array(a, chunks=13)
    for C in (matmul(A.T, A), matmul(a.T, a), gemm(1, A, A, transa=True), gemm(1, a, a, transa=True)):
        np.testing.assert_allclose(C.compute(), a.T @ a)
    np.testing.assert_allclose(gemm(1, A, A, transb=True).compute(), a @ a.T)


def test_transposed_batches_swap_the_last_two_dimensions() -> None:
    a = random((3, 8, 6))
    np.testing.assert_allclose(gemm(1, a, a, transa=True).compute(), np.swapaxes(a, 1, 2) @ a)


def test_gemm_scales_and_adds() -> None:
    a, b, c = random((20, 30)), random((30, 10), seed=1), random((20, 10), seed=2)
    A, B, C = (da.from_array(x, chunks=7) for x in (a, b, c))
    np.testing.assert_allclose(gemm(2.5, A, B, -1.5, C).compute(), 2.5 * (a @ b) - 1.5 * c)
    np.testing.assert_allclose(gemm(2, A, B, 3, np.ones(10)).compute(), 2 * (a @ b) + 3)
    np.testing.assert_allclose(gemm(1, a[0], b, 1, c[0]).compute(), a[0] @ b + c[0])


class Reads:
    """An array-like that notes the shape of every region that is read."""

    shape, dtype, ndim = (20, 10), np.dtype("f8"), 2

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        block = np.ones(self.shape)[index]
        self.shapes.append(block.shape)
        return block


def test_gemm_reads_a_c_of_its_own_shape_block_by_block() -> None:
    a, b, c = random((20, 30)), random((30, 10), seed=1), Reads()
    np.testing.assert_allclose(gemm(1, a, b, 2, c, blocks=(5, 30, 5)).compute(), a @ b + 2)
    assert c.shapes == [(5, 5)] * 8


@pytest.mark.parametrize("shape", [(2, 5), (4, 4), (1, 4, 5)])
def test_gemm_refuses_a_c_that_does_not_broadcast_to_the_product(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=re.escape(f"C has shape {shape}, the product (4, 5): give a C that broadcasts")
    ):
        gemm(1, np.ones((4, 3)), np.ones((3, 5)), 1, np.ones(shape))


def test_matrices_whose_lengths_are_all_0_get_the_chunks_of_the_others() -> None:
    none, halves = da.from_array(np.ones((0, 0))), ((0, 0), (0,))
    assert matmul(da.ones((1, 0), chunks=((1,), (0, 0))), none).compute().shape == (1, 0)
    c = gemm(1, da.ones((0, 3), chunks=((0, 0), (3,))), np.ones((3, 0)), 1, none)
    assert (c.chunks, c.compute().shape) == (halves, (0, 0))


@pytest.mark.parametrize("chunks", [None, 3])
def test_gemm_and_gram_do_not_read_a_and_b_when_alpha_is_zero(chunks: int | None) -> None:
    nans, c = np.full((6, 6), np.nan), np.arange(36.0).reshape(6, 6)
    a = nans if chunks is None else da.from_array(nans, chunks)
    assert np.array_equal(gemm(0, a, nans, 2, c, transa=True).compute(), 2 * c)
    assert np.array_equal(gemm(0, a, nans[0], 1, c[0]).compute(), c[0])
    assert np.array_equal(gram(a, alpha=0, beta=2, C=c + c.T).compute(), 2 * (c + c.T))


def test_gemm_does_not_read_c_when_beta_is_zero() -> None:
    a = random((4, 4))
    np.testing.assert_allclose(gemm(1, a, a, 0, np.full((4, 4), np.nan)).compute(), a @ a)


def test_gemm_with_a_fractional_alpha_makes_integers_floats() -> None:
    a = np.arange(6).reshape(2, 3)
    c = gemm(0.5, a, a.T)
    assert c.dtype == np.float64
    np.testing.assert_allclose(c.compute(), 0.5 * (a @ a.T))


def test_zarr_arrays_are_read_block_by_block(tmp_path: object) -> None:
    a = random((60, 50), "f4")
    z = zarr.create_array(tmp_path / "a.zarr", shape=a.shape, chunks=(20, 10), dtype="f4")
    z[:] = a
    C = matmul(z, z[:].T, blocks=(20, 10, 30))
    assert C.chunks == ((20, 20, 20), (30, 30))
    np.testing.assert_allclose(C.compute(), a @ a.T, rtol=1e-3)
    np.testing.assert_allclose(gemm(1, z, z, transa=True).compute(), a.T @ a, rtol=1e-3)


@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_maps_travel_as_file_names(tmp_path: object, order: str) -> None:
    a = np.asarray(random((300, 200), "f4"), order=order)
    np.save(tmp_path / "a.npy", a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    C = matmul(mapped, mapped.T, blocks=(100, 100, 100))
    left = matmul(mapped, np.ones((200, 3), "f4"), blocks=(100, 100, 100))
    assert max(len(pickle.dumps(task)) for task in left.__dask_graph__().values()) < 5000
    np.testing.assert_allclose(left.compute(), a @ np.ones((200, 3), "f4"), rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(C.compute(), a @ a.T, rtol=1e-3, atol=1e-2)


def test_a_plan_can_be_made_first_and_given_back() -> None:
    a, b = random((100, 80)), random((80, 60), seed=1)
    p = plan(a, b, blocks=(32, 32, 32))
    C = matmul(a, b, plan=p)
    assert C.chunks == (p.blocking.m, p.blocking.n)
    np.testing.assert_allclose(C.compute(), a @ b)
    with pytest.raises(InputError, match="make a new plan"):
        matmul(b, a.T[:60], plan=p)


@pytest.mark.usefixtures("blocks_are_chunks")
def test_the_text_of_a_plan_with_the_operands_chunks_predicts_what_the_plan_does() -> None:
    A, B = da.ones((100, 80), chunks=20), da.ones((80, 60), chunks=20)
    made = plan(A, B)
    again, other = plan(A, B, plan=str(made)), plan(A, B, plan=str(made).replace("b20x20x20", "b20x40x20"))
    assert again == made
    assert (made.operands, other.operands) == (("loaded",) * 2, ("whole",) * 2)  # those would be made by a rechunk


def test_the_text_of_a_plan_that_unites_chunks_gives_the_same_plan_and_the_same_chunks() -> None:
    a, b = random((130, 110)), random((110, 90), seed=1)
    A, B = da.from_array(a, chunks=20), da.from_array(b, chunks=20)
    made = plan(A, B)
    assert str(made) == "g1x1x1 b130x110x90 p1 w1 l2 c20x20x20"
    assert plan(A, B, plan=str(made)) == made
    C = matmul(A, B, plan=str(made))
    assert C.chunks == matmul(A, B, plan=made).chunks == (A.chunks[0], B.chunks[1])
    np.testing.assert_allclose(C.compute(), a @ b)
    for changes in ("c20x20x20", "c0x20x20"), ("c20x20x20", "c20x20"), (" w1", " w2"), ("g1x1x1", "g1x1x2"):
        with pytest.raises(InputError, match="does not fit a product"):
            plan(A, B, plan=str(made).replace(*changes))


def test_two_products_of_the_same_arrays_share_their_keys() -> None:
    A = da.ones((10, 10), chunks=5)
    assert matmul(A, A).name == matmul(A, A).name
    assert matmul(A, A).name != gemm(2, A, A).name


class Unsized:
    dtype = np.dtype("f8")

    def __getitem__(self, index: object) -> None: ...


@pytest.mark.parametrize(
    ("A", "B", "message"),
    [
        (np.ones((3, 4)), np.ones((5, 6)), r"\(3, 4\).*\(5, 6\).*\(4\).*\(5\)"),
        (np.ones((2, 3, 4)), np.ones((3, 4, 5)), r"\(2,\) and \(3,\) do not broadcast"),
        (np.ones((2, 2), object), np.ones((2, 2)), "A: matrices of dtype object"),
        (np.ones((2, 2)), np.full((2, 2), "x"), "B: matrices of dtype <U1"),
        (np.float64(3), np.ones((2, 2)), "A is a scalar"),
        (5, np.ones((2, 2)), "A is a scalar"),
        ("file.npy", np.ones((2, 2)), "A is a str of builtins, the name of a file"),
        (Unsized(), np.ones((2, 2)), "A is a Unsized without shape"),
        (
            da.ones(10, chunks=5)[da.ones(10, chunks=5) > 0],
            np.ones((10, 2)),
            "unknown chunk sizes.*compute_chunk_sizes",
        ),
    ],
)
def test_bad_operands_are_refused_before_any_work(A: object, B: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        matmul(A, B)


def test_foreign_chunk_types_are_refused() -> None:
    A = da.ones((4, 4), chunks=2).map_blocks(np.ma.masked_array, meta=np.ma.masked_array(np.empty((0, 0))))
    with pytest.raises(InputError, match="MaskedArray"):
        matmul(A, A)


def test_bad_options_are_refused_with_the_good_ones() -> None:
    a = np.ones((4, 4))
    with pytest.raises(InputError, match="device 'tpu' is not one of"):
        matmul(a, a, device="tpu")
    with pytest.raises(InputError, match=r"kernel 'fastest' is not one of .* cpu,"):
        matmul(a, a, kernel="fastest")
    with pytest.raises(InputError, match="three positive edges"):
        matmul(a, a, blocks=(2, 2))
    with pytest.raises(InputError, match="there is no C"):
        gemm(1, a, a, 1)
    with pytest.raises(InputError, match="alpha is 'x'"):
        gemm("x", a, a)
    with pytest.raises(InputError, match="give a C that broadcasts"):
        gemm(1, a, a, 1, np.ones((3, 3)))


def test_a_gpu_that_is_not_there_is_refused() -> None:
    from distmm_kernels import device

    if device.gpus():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="a GPU is asked for"):
        matmul(np.ones((4, 4)), np.ones((4, 4)), device="gpu")


def test_products_larger_than_the_cluster_are_refused(client: object) -> None:
    A = da.ones((100_000, 100_000), chunks=10_000, dtype="f4")
    with pytest.raises(DoesNotFitError, match="short by"):
        matmul(A, A, client=client)
