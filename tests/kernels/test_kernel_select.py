from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import FLOAT8, NARROW, PRECISIONS, SUPPORTED, Problem, compute_dtype
from distmm_kernels.gemm.cpu import CpuKernel
from distmm_kernels.rates import SIZES, rate, rates_of, relative, seconds
from distmm_kernels.select import WORTH, choose, explain, promises_bits, ranked, select, why_not
from tests.kernels.selection import A100, BY_MMA_SYNC, BY_NAME, GEFORCE, H200, T4, chosen, problem
from tests.tables import for_each

CPU = device.cpu()
B200 = dataclasses.replace(H200, name="NVIDIA B200", compute_capability=(10, 0), multiprocessors=148)
OF_ANY_SIZE = ("register_tiled", "complex_chain", "dmma", "mma_sync", "mma_sync_bf16")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_cpu_serves_every_type_and_precision(dtype, precision):
    kernel = select(problem(dtype), CPU, precision)
    assert isinstance(kernel, CpuKernel)
    assert kernel.name == "cpu"
    assert kernel.device_kind == "cpu"


@pytest.mark.parametrize(
    ("precision", "name", "elsewhere", "on_small_gpus"),
    [
        ("ieee", "register_tiled", "register_tiled", "register_tiled"),
        ("highest", "fp16x3", "mma_sync_fp16x3", "register_tiled"),
        ("high", "hopper_tf32", "mma_sync_tf32", "mma_sync_tf32"),
        ("medium", "hopper_bf16", "mma_sync_bf16", "mma_sync_bf16"),
    ],
)
def test_precision_chooses_among_the_kernels_for_float32(precision, name, elsewhere, on_small_gpus):
    for reproducible in (False, True):
        assert chosen(problem(k=8192, n=8192), H200, precision, reproducible=reproducible) == name
        for where, expected in ((A100, elsewhere), (B200, elsewhere), *((each, on_small_gpus) for each in GEFORCE)):
            assert chosen(problem(k=8192, n=8192), where, precision, reproducible=reproducible) == expected
    assert chosen(problem(k=8192, n=8192), T4, precision) == "tiled"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_have_one_precision(dtype, precision):
    for size in (4096, 8192, 16384):
        assert chosen(problem(dtype, k=size, n=size), H200, precision) == "integer_residues"
        for where in (A100, B200, *GEFORCE):
            assert chosen(problem(dtype, k=size, n=size), where, precision) == BY_MMA_SYNC[dtype]
    assert chosen(problem(dtype, k=1, n=1), H200, precision, reproducible=True) == "integer_residues"
    assert chosen(problem(dtype, k=4096, n=4096), T4, precision) == "tiled"


# Each was measured on an H200 on 2026-11-26; what was chosen before took 2.3 to 3.2 times as long.
@pytest.mark.parametrize(
    ("dtype", "shape", "name"),
    [
        ("bfloat16", (4541, 12703, 927), "hopper"),  # cuBLAS is slow if k is odd
        ("float16", (13836, 18, 327), "cublas"),  # the host copies both operands for our kernel
        ("float64", (14, 998, 82), "dmma"),
        ("float64", (12, 122, 78), "dmma"),
    ],
)
def test_thin_shallow_and_odd_shapes_take_the_kernel_that_was_the_fastest(dtype, shape, name):
    product = Problem(*shape, np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    assert choose(product, H200, "highest").name == name


def test_one_tile_of_a_deep_product_takes_as_long_as_a_full_wave_of_tiles():
    thin, wave = (
        seconds(BY_NAME["register_tiled"], Problem(64, 65536, n, np.dtype("int32")), H200) for n in (64, 8448)
    )
    assert thin == wave


def test_the_host_copies_operands_whose_rows_do_not_begin_at_vectors():
    even, odd = (seconds(BY_NAME["dmma"], float64(64, k, k), H200) for k in (64, 63))
    assert odd - even == pytest.approx(2 * rates_of(H200).host_copy)


@pytest.mark.parametrize("shape", [(512, 512, 512), (100, 200, 300)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_small_products_of_integers_stay_in_registers(dtype, shape):
    assert chosen(Problem(*shape, np.dtype(dtype)), H200) == "register_tiled"


@pytest.mark.parametrize(("dtype", "name"), [("complex64", "complex_fp16x3"), ("complex128", "complex_residues")])
def test_complex_numbers_go_to_tensor_cores_unless_a_chain_is_asked_for(dtype, name):
    for precision in ("highest", "high", "medium"):
        for size in (2048, 8192, 16384):
            assert chosen(problem(dtype, k=size, n=size), H200, precision) == name
        assert chosen(problem(dtype, k=1, n=1), H200, precision, reproducible=True) == name
        for where in (A100, B200, *GEFORCE):
            elsewhere = BY_MMA_SYNC.get(dtype, "complex_chain")
            assert chosen(problem(dtype, k=8192, n=8192), where, precision) == elsewhere
        assert chosen(problem(dtype, k=8192, n=8192), T4, precision) == "tiled"
    assert chosen(problem(dtype, k=8192, n=8192), H200, "ieee") == "complex_chain"
    assert (
        select(problem(dtype), H200, "ieee")._real.name == {"complex64": "register_tiled", "complex128": "dmma"}[dtype]
    )
    assert select(problem(dtype), GEFORCE[0], "ieee")._real.name == "register_tiled"


# Others have more passes over operands, and over residues of C, than tensor cores save.
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("complex64", (512,) * 3), ("complex128", (512,) * 3), ("complex128", (64, 8192, 8192))],
)
def test_complex_products_that_tensor_cores_slow_down_stay_in_registers(dtype, shape):
    assert chosen(Problem(*shape, np.dtype(dtype)), H200) == "complex_chain"


def float64(m, k, n, batch=()):
    return Problem(m, k, n, np.dtype("float64"), batch)


@pytest.mark.parametrize(
    ("precision", "name"), [("ieee", "dmma"), ("highest", "residues"), ("high", "residues"), ("medium", "residues")]
)
def test_precision_chooses_among_the_kernels_for_float64(precision, name):
    for size in (4096, 8192, 16384):
        assert chosen(float64(size, size, size), H200, precision) == name
    assert chosen(float64(1, 1, 1), H200, precision, reproducible=True) == name
    for where in (A100, B200):
        assert chosen(float64(8192, 8192, 8192), where, precision) == (
            "dmma" if precision == "ieee" else BY_MMA_SYNC["float64"]
        )
    assert chosen(float64(8192, 8192, 8192), T4, precision) == "tiled"


def test_guarded_granules_on_geforce_cards_are_multiplied_in_registers():
    for where in GEFORCE:
        assert select(problem("float64"), where, name="mma_sync_residues")._ieee.name == "register_tiled"
    assert select(problem("float64"), A100, name="mma_sync_residues")._ieee.name == "dmma"


@pytest.mark.parametrize(("name", "dtype", "fallback"), [("residues", "float64", "dmma"),
                                                         ("complex_residues", "complex128", "complex_chain"),
                                                         ("fp16x3", "float32", "register_tiled")])  # fmt: skip
def test_guarded_granules_are_multiplied_by_the_fastest_chain(name, dtype, fallback):
    assert select(problem(dtype), H200, name=name)._ieee.name == fallback


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_operands_go_to_tensor_cores_unless_a_chain_of_float32_is_asked_for(dtype):
    large = problem(dtype, k=4096, n=4096)
    assert chosen(large, H200) == "hopper"
    assert chosen(large, H200, "medium") == ("hopper_float8" if dtype in FLOAT8 else "hopper")
    assert chosen(large, H200, "ieee") == ("hopper" if compute_dtype(dtype).kind == "i" else "register_tiled")
    elsewhere = "register_tiled" if dtype in ("uint8", "bool") else "mma_sync"
    for where in (A100, B200, *GEFORCE):
        assert chosen(large, where) == chosen(large, where, "medium") == elsewhere
        chain = elsewhere if compute_dtype(dtype).kind == "i" else "register_tiled"
        assert chosen(large, where, "ieee") == chain
    assert chosen(large, T4) == "tiled"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [*((dtype, "highest") for dtype in NARROW), *(("float32", each) for each in ("highest", "high", "medium"))],
)
def test_on_a_hopper_gpu_its_own_kernels_come_first(dtype, precision):
    for size in (4096, 16384) if dtype == "int8" else (64, 512, 1024, 2048, 4096, 16384):
        assert not chosen(problem(dtype, k=size, n=size), H200, precision).startswith("mma_sync")


@for_each([H200, A100, T4], PRECISIONS, SUPPORTED + NARROW)
def test_what_is_chosen_is_legal_and_as_precise_as_asked(where, precision, dtype):
    for size in (1, 100, 1000, 10_000):
        product = problem(dtype, k=size, n=size)
        assert why_not(choose(product, where, precision), product, where, precision) is None


@for_each([H200, A100, B200, T4, *GEFORCE], PRECISIONS, SUPPORTED + NARROW)
def test_the_library_is_chosen_where_it_is_faster_by_more_than_a_promise_of_bits_is_worth(where, precision, dtype):
    for size in (64, 512, 1024, 3000, 8192):
        product = problem(dtype, k=size, n=size)
        listed = ranked(product, where, precision)
        (best, time), least = listed[0], min(time for _, time in listed)
        with_bits = min(time for candidate, time in listed if promises_bits(candidate, product))
        if promises_bits(best, product):
            assert time == with_bits <= WORTH * least
        else:
            assert best.granule is None
            assert WORTH * time <= with_bits
            assert choose(product, where, precision, reproducible=True).granule is not None


def test_the_library_has_the_precisions_that_its_paths_have():
    paths = {"cublas": "highest", "cublas_tf32": "high", "cublas_int8": "ieee"}
    for name, precision in paths.items():
        assert (BY_NAME[name].precision, BY_NAME[name].granule) == (precision, None)
    assert why_not(BY_NAME["cublas_tf32"], problem(), H200, "highest") == "its products are of precision 'high'"
    assert why_not(BY_NAME["cublas"], problem(), H200, "ieee") == "its products are of precision 'highest'"
    assert why_not(BY_NAME["cublas_int8"], problem("int8"), H200, "ieee", reproducible=True) is None, "it is exact"
    for narrow in ("int32", "uint8", "bool"):
        assert not any(narrow in BY_NAME[name].dtypes for name in paths)
    assert choose(problem(k=8192, n=8192), T4, "highest").name == "cublas"
    assert choose(problem(k=8192, n=8192), T4, "ieee").name == "tiled"


def test_a_promise_of_bits_is_given_as_the_reason_where_it_decides(monkeypatch):
    monkeypatch.setattr("distmm_kernels.select.WORTH", 100.0)
    text = explain(problem(k=8192, n=8192), T4)
    assert "float32 on Tesla T4 (cuda:0), precision highest: tiled," in text
    assert ", tiled takes" in text
    assert "but has reproducible bits, which are worth" in text


@pytest.mark.parametrize("shape", [(8192, 8192, 1), (1, 8192, 8192), (16, 8192, 8192)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_thin_products_go_to_the_library_which_reads_at_the_rate_of_memory(dtype, shape):
    (first, _), *_ = ranked(Problem(*shape, np.dtype(dtype)), H200, "highest")
    assert first.name == "cublas"


def test_small_products_are_not_split_for_tensor_cores():
    assert chosen(problem(k=256, n=256), H200) == "register_tiled"


def test_batches_count_as_work():
    assert chosen(Problem(512, 512, 512, np.dtype("float32"), batch=(16, 32)), H200) == "fp16x3"


def test_old_gpus_without_asynchronous_copies_take_the_textbook_tile():
    assert chosen(problem(n=4096), T4) == "tiled"
    with pytest.raises(ValueError, match=r"compute capability 8.0 or more, and Tesla T4 .* has 7.5"):
        select(problem(), T4, name="register_tiled")
    with pytest.raises(ValueError, match=r"compute capability 9.0, and NVIDIA A100 .* has 8.0"):
        select(problem(), A100, name="fp16x3")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", SUPPORTED + NARROW)
def test_a_reproducible_choice_promises_its_bits_and_does_not_look_at_sizes(dtype, precision):
    found = {
        chosen(Problem(m, k, n, np.dtype(dtype), batch), H200, precision, reproducible=True)
        for m, k, n, batch in ((1, 1, 1, ()), (8192, 8192, 8192, ()), (100, 3, 5000, (7,)))
    }
    assert len(found) == 1
    assert BY_NAME[found.pop()].granule is not None


def test_a_promise_that_nobody_makes_is_refused():
    with pytest.raises(ValueError, match="promises the same bits for any cuts of k"):
        select(problem(), CPU, reproducible=True)
    with pytest.raises(ValueError, match=r"'cublas'.*its bits may change with how k is cut"):
        select(problem(), H200, reproducible=True, name="cublas")
    assert select(problem("int32"), CPU, reproducible=True).name == "cpu", "integers are exact"


@pytest.mark.parametrize("name", ["register_tiled", "tiled", "cublas"])
def test_a_name_forces_a_kernel(name):
    assert select(problem(), H200, name=name).name == name


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_the_table_agrees_with_the_kernels(candidate):
    where = CPU if candidate.device_kind == "cpu" else H200
    types = ("float32", "float16", "float64", "complex64", "complex128", "int64", "int8", "float8_e4m3fn")
    dtype = next(name for name in types if name in candidate.dtypes)
    kernel = select(problem(dtype), where, name=candidate.name)
    assert type(kernel) is candidate.kernel
    assert (kernel.name, kernel.granule) == (candidate.name, candidate.granule)


@pytest.mark.parametrize("candidate", [c for c in CANDIDATES if c.device_kind == "cuda"], ids=lambda c: c.name)
def test_rates_rise_with_size_and_every_type_has_one(candidate):
    for dtype in candidate.dtypes:
        rates = [rate(candidate, problem(dtype), H200, edge) for edge in (1, 100, *SIZES, 3000, 100_000)]
        assert all(low > 0 for low in rates)
        ascending = [rate(candidate, problem(dtype), H200, edge) for edge in (1, 100, 512, 700, 1024, 2048)]
        assert ascending == sorted(ascending)
        there, here = (rate(candidate, problem(dtype), where, 4096) for where in (GEFORCE[2], H200))
        factor = relative(candidate, problem(dtype), GEFORCE[2])
        assert there == pytest.approx(factor * here)
        assert factor == 1 or dtype in BY_MMA_SYNC


def test_a_name_that_cannot_serve_is_refused_with_the_names_that_can():
    with pytest.raises(ValueError, match=r"does not multiply int32; use one of integer_residues"):
        select(problem("int32"), H200, name="cublas")
    with pytest.raises(ValueError, match=r"runs on cuda devices.*; use one of cpu$"):
        select(problem(), CPU, name="tiled")
    with pytest.raises(ValueError, match=r"'fastest'.*no kernel of this name; use one of cpu$"):
        select(problem(), CPU, name="fastest")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'double': use one of highest, high, medium, ieee"):
        select(problem(), CPU, "double")
    with pytest.raises(ValueError, match="'double'"):
        explain(problem(), CPU, "double")


def test_a_row_of_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="tiled has precision 'exact'"):
        dataclasses.replace(BY_NAME["tiled"], precision="exact")


def test_explain_gives_a_reason_for_every_candidate_of_the_kind_of_device():
    first, *others = explain(problem(k=2048, n=2048), H200, "ieee").splitlines()
    assert first.startswith(
        "(2048, 2048) @ (2048, 2048) float32 on NVIDIA H200 (cuda:0), precision ieee: register_tiled,"
    )
    reasons = dict(line.removeprefix("  not ").split(": ", 1) for line in others)
    assert set(reasons) == set(BY_NAME) - {"cpu", "register_tiled"}
    assert reasons["fp16x3"] == "its products are of precision 'highest'"
    assert "used on this GPU only when asked for by name" in reasons["tiled"]
    assert " µs expected, " in explain(problem(k=2048, n=2048), H200)
    assert "does not multiply int64" in explain(problem("int64"), H200)
    assert len(explain(problem(), CPU).splitlines()) == 1, "the GPU kernels are no news where there is no GPU"


@pytest.mark.parametrize("name", [c.name for c in CANDIDATES if c.capabilities == ((9, 0), (9, 0))])
def test_kernels_that_count_in_32_bits_refuse_larger_sizes_and_others_take_their_place(name):
    candidate = BY_NAME[name]
    limit = 2**30 if name.startswith("complex") else 2**31  # a complex row is two real numbers an element
    dtype = np.dtype(min(candidate.dtypes))
    for sizes in ((limit, 8, 8), (8, limit, 8), (8, 8, limit)):
        assert "along an axis" in why_not(candidate, Problem(*sizes, dtype), H200)
        below = (min(size, limit - 1) for size in sizes)
        assert why_not(candidate, Problem(*below, dtype), H200) is None
        assert chosen(Problem(*sizes, dtype), H200, "medium", reproducible=True) in OF_ANY_SIZE
    assert "along an axis" in why_not(candidate, Problem(8, 8, 8, dtype, (2, limit // 2)), H200)
    with pytest.raises(ValueError, match=r"along an axis, and a size is"):
        select(Problem(limit, 8, 8, dtype), H200, name=name)
