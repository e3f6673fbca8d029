"""The fastest kernel by default, or one that promises its bits: what is chosen, said and refused."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from typer.testing import CliRunner

import distmm
from distmm.cli.app import app
from distmm.errors import InputError
from distmm.job.planning import request
from distmm.job.spec import Spec
from distmm.product.choices import Choices


def shaped(*shape, dtype="f4"):
    return np.broadcast_to(np.zeros((), dtype), shape)


def rows(dtype, model, **how):
    a = shaped(50_000, 50_000, dtype=dtype)
    return dict(distmm.plan(a, a, cluster=distmm.gpus(2, model), **how).rows())


@pytest.mark.parametrize(("dtype", "model", "fastest", "promised"), [("f2", "A100", "cublas", "mma_sync"),
                                                                     ("f2", "B200", "cublas", "mma_sync")])  # fmt: skip
def test_the_fastest_kernel_is_chosen_unless_bits_are_asked_for(dtype, model, fastest, promised):
    by_default, kept = rows(dtype, model), rows(dtype, model, reproducible=True)
    assert by_default["kernel"] == f"{fastest}, precision highest"
    assert by_default["bits"].startswith("not promised")
    assert "reproducible" in by_default["bits"]
    assert kept["kernel"] == f"{promised}, precision highest"
    assert kept["bits"] == "as if C were one block"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "i1", "i8"])
def test_on_an_h200_our_kernels_promise_bits_by_default(dtype):
    assert rows(dtype, "H200") == rows(dtype, "H200", reproducible=True)
    assert rows(dtype, "H200")["bits"] == "as if C were one block"


def test_a_named_kernel_without_a_promise_is_refused_where_bits_are_asked_for():
    assert rows("f4", "H200", kernel="cublas")["bits"].startswith("not promised")
    with pytest.raises(InputError, match=r"'cublas'.*its bits may change with how k is cut"):
        rows("f4", "H200", kernel="cublas", reproducible=True)


@pytest.mark.parametrize("call", [distmm.matmul, distmm.plan, lambda a, b, **how: distmm.gemm(1, a, b, **how),
                                  lambda a, b, **how: distmm.gram(a, **how)])  # fmt: skip
def test_float_products_on_cpus_cannot_be_asked_for_bits(call):
    a = np.ones((40, 40))
    with pytest.raises(InputError, match="promises the same bits for any cuts of k: leave out reproducible=True"):
        call(a, a, device="cpu", reproducible=True)
    with pytest.raises(InputError, match="reproducible is 1"):
        call(a, a, device="cpu", reproducible=1)


def test_integers_always_have_the_same_bits():
    a = np.arange(1600).reshape(40, 40)
    c = distmm.matmul(a, a, device="cpu", reproducible=True, blocks=(20, 7, 20))
    np.testing.assert_array_equal(c.compute(scheduler="sync"), a @ a)


def test_plans_on_cpus_do_not_promise_bits_of_floats():
    a = np.ones((40, 40))
    floats = dict(distmm.plan(a, a, device="cpu").rows())["bits"]
    assert floats == "not promised: the kernel adds in an order of its own"
    assert dict(distmm.plan(a.astype(int), a.astype(int), device="cpu").rows())["bits"] == "as if C were one block"


def test_the_configuration_has_the_default():
    with dask.config.set({"distmm.reproducible": True}):
        assert rows("f2", "A100")["kernel"].startswith("mma_sync")
        assert rows("f2", "A100", reproducible=False)["kernel"].startswith("cublas")
    with (
        dask.config.set({"distmm.reproducible": "perhaps"}),
        pytest.raises(InputError, match=r"distmm.reproducible: 'perhaps', which is neither true nor false"),
    ):
        rows("f2", "A100")


def test_a_job_keeps_the_wish_in_its_manifest(tmp_path):
    np.save(tmp_path / "A.npy", np.arange(64).reshape(8, 8))
    path = str(tmp_path / "A.npy")
    plain, promised = Spec.of(path, path, None), Spec.of(path, path, None, Choices(device="cpu", reproducible=True))
    for spec in (plain, promised):
        assert Spec.from_json(spec.json()).choices.reproducible == spec.choices.reproducible
    assert request(promised).choices.reproducible


def test_a_job_on_cpus_is_refused_before_any_work(client, tmp_path):
    a, c = np.ones((8, 8)), tmp_path / "C.npy"
    with pytest.raises(InputError, match="promises the same bits"):
        distmm.multiply(a, a, str(c), client=client, reproducible=True)
    assert not c.exists()


@pytest.mark.minutes
def test_the_commands_have_an_option_for_it():
    sizes = "50000x50000:float16"
    outputs = [
        CliRunner().invoke(
            app, ["plan", sizes, sizes, "--gpus", "8", "--model", "A100", "--gpu-memory", "1TB", *option]
        )
        for option in (["--fastest"], ["--reproducible"])
    ]
    assert [result.exit_code for result in outputs] == [0, 0]
    assert [next(x for x in ("cublas", "mma_sync") if x in result.output) for result in outputs] == [
        "cublas",
        "mma_sync",
    ]
