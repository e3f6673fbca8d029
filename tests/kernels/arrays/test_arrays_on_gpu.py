"""`matmul`, `gram` and `verify` on a GPU: layouts, streams, captured graphs, and each package that is installed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import gram, matmul, verify

pytestmark = pytest.mark.gpu

SHAPES = [(300, 200, 100), (77, 513, 31), (1024, 1024, 1024)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_any_layout_and_batch_is_multiplied_in_place_or_copied(dtype):
    import cupy

    for m, k, n in SHAPES:
        a, b = cupy.random.standard_normal((m, k)).astype(dtype), cupy.random.standard_normal((k, n)).astype(dtype)
        expected = a.astype("complex128") @ b.astype("complex128")
        for x in (a, cupy.asfortranarray(a), cupy.repeat(a, 2, 1)[:, ::2]):
            for _ in range(2):  # the second call looks up what the first has learnt
                made = matmul(x, b)
                assert made.flags.c_contiguous
                assert float(abs(made - expected).max()) < 1e-2
    stack = cupy.random.standard_normal((3, 1, 20, 30)).astype(dtype)
    other = cupy.random.standard_normal((4, 30, 10)).astype(dtype)
    for _ in range(2):
        assert float(abs(matmul(stack, other) - stack @ other).max()) < 1e-3
    assert float(abs(matmul(stack[0, 0, 0], other) - stack[0, 0, 0] @ other).max()) < 1e-3


@pytest.mark.parametrize(("m", "k", "n"), [(64, 64, 64), (300, 128, 96), (48, 1000, 1024), (33, 60, 16), (40, 62, 48)])
def test_small_products_of_int8_are_exact_wherever_they_are_computed(m, k, n):
    import cupy

    a, b = cupy.random.randint(-100, 100, (m, k)).astype("i1"), cupy.random.randint(-100, 100, (k, n)).astype("i1")
    for right in (b, cupy.asfortranarray(b)):
        for _ in range(2):  # the second call looks up what the first has learnt
            made = matmul(a, right, cupy.empty((m, n), "i4"))
            assert (made == (a.astype("f8") @ b.astype("f8"))).all()


def test_numpy_and_numba_arrays_come_back_as_such():
    from numba import cuda

    a = np.ones((50, 40), "f4")
    made = matmul(cuda.to_device(a), cuda.to_device(a.T.copy()))
    assert type(made).__module__.startswith("numba")
    assert (made.copy_to_host() == 40).all()
    assert (matmul(a, a.T, device="cuda") == 40).all()


def test_a_gram_is_hermitian_bit_for_bit():
    import cupy
    from numba import cuda

    for dtype in ("float32", "float64", "complex64", "complex128"):
        a = cupy.random.standard_normal((300, 200)).astype(dtype)
        a += 0.5j * a[::-1] if np.dtype(dtype).kind == "c" else 0
        made = gram(a)
        assert bool((made == made.conj().T).all())
        assert float(abs(made - a @ a.conj().T).max()) < 1e-2
        of_numba = gram(cuda.as_cuda_array(a))
        assert type(of_numba).__module__.startswith("numba")
        assert (of_numba.copy_to_host() == made.get()).all()


def test_a_captured_graph_reads_new_numbers_and_has_its_own_memory():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    a, out = cupy.random.standard_normal((1000, 1003)).astype("f4"), cupy.empty((1000, 1000), "f4")
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(2):
            matmul(a, a.T, out)
        stream.synchronize()
        stream.begin_capture()
        matmul(a, a.T, out)
        graph = stream.end_capture()
        a *= 2
        out[...] = 0
        graph.launch()
        stream.synchronize()
        assert float(abs(out - a @ a.T).max()) < 1e-2


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_wrong_element_is_found_and_a_right_product_passes(dtype):
    import cupy

    error = 40j if dtype.startswith("complex") else 40

    def drawn(*shape):
        made = cupy.random.standard_normal(shape).astype(dtype)
        return made + cupy.random.standard_normal(shape).astype(dtype) * error / 40

    for m, k, n in SHAPES:
        a, b = drawn(m, k), drawn(k, n)
        c = matmul(a, b)
        assert c.dtype == dtype
        assert verify(a, b, c)
        assert verify(cupy.asfortranarray(a), cupy.asfortranarray(b), c)
        c[5, 7] += error
        assert "element (5, 7)" in verify(a, b, c).message
    for others in ((31, 11), (3, 31, 11)):  # rows of an odd number of products
        stack, other = drawn(3, 21, 31), drawn(*others)
        c = stack @ other
        assert verify(stack, other, c)
        c[2, 20, 10] += error
        assert "element (2, 20, 10)" in verify(stack, other, c).message
    c, b = cupy.empty((2, 64, 64), dtype)  # matrices that one launch reads, the second one before the first
    a, b[...] = drawn(64, 64), drawn(64, 64)
    c[...] = a @ b
    assert verify(a, b, c)
    b[3, 4] += error
    assert not verify(a, b, c)


@pytest.mark.parametrize("scale", [1e-20, 1, 1e25])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_rows_are_right_at_any_scale(gpu, dtype, scale):
    import cupy

    from distmm_kernels.reductions.thin_products import times_vectors

    matrix = (scale * cupy.random.standard_normal((33, 1037))).astype("f4")
    matrix[3, 5:900] = 0
    matrix[4] *= 1e-9
    matrix = matrix.astype(np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else dtype)
    x = cupy.random.standard_normal((1037, 2)).astype("f4")
    products, squares = times_vectors(matrix, x, gpu)
    exact = matrix.astype("f4").astype("f8")
    np.testing.assert_allclose(squares.get(), (exact**2).sum(-1).get(), rtol=1e-5)
    bound = 1e-5 * (abs(exact) @ abs(x.astype("f8"))).get()
    assert (abs(products.get() - (exact @ x.astype("f8")).get()) <= bound + 1e-40).all()


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128", "bfloat16"])
def test_settings_of_pytorch_change_no_product(name, monkeypatch):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    x, y = (torch.randn(300, 300, device="cuda", dtype=dtype) for _ in range(2))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact, out = x.to(wide) @ y.to(wide), torch.empty_like(x)
    most = {"float32": 1e-6, "complex64": 1e-6, "bfloat16": 3e-3}.get(name, 1e-14)

    def check() -> None:
        for _ in range(3):  # the launch of the first call is learnt
            for made in (matmul(x, y), matmul(x, y, out)):
                assert made.dtype == dtype
                assert (made.to(wide) - exact).norm() < most * exact.norm()

    check()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    check()
    with torch.autocast("cuda", dtype=torch.float16):
        check()


def test_pytorch_tensors_keep_their_gradients_stream_and_graph():
    torch = pytest.importorskip("torch")
    a = torch.randn(40, 30, device="cuda", dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 30, 20, device="cuda", dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: matmul(a, b, alpha=2), (a, b), fast_mode=True)
    for dtype, n in ((torch.bfloat16, 256), (torch.bfloat16, 1023), (torch.float32, 512)):
        x, y = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        stream, out = torch.cuda.Stream(), torch.empty_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                matmul(x, y, out)
                made = matmul(x, y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            matmul(x, y, out)
            made = matmul(x, y)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = x.double() @ y.double()
        for each in (out, made):
            assert (each - expected).norm() < 1e-2 * expected.norm()
