"""Dask's configuration has a section ``distmm`` with the defaults of arguments."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import yaml

import distmm
from distmm import config
from distmm.errors import InputError

A = np.ones((8, 8), "f4")


@pytest.fixture(autouse=True)
def synchronous() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def test_the_section_has_the_defaults_of_the_file() -> None:
    assert dask.config.get("distmm") == config.DEFAULTS
    plan = distmm.plan(A, A)
    assert (plan.precision, plan.kernel, plan.cluster.device) == ("highest", None, "cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: distmm.plan(A, A, **how),
        lambda **how: distmm.plan(A, **how),
        lambda **how: planned(distmm.matmul(A, A, **how)),
        lambda **how: planned(distmm.gemm(1, A, A, **how)),
        lambda **how: planned(distmm.gram(A, **how)),
    ],
    ids=["plan", "plan of gram", "matmul", "gemm", "gram"],
)
def test_a_setting_is_the_default_and_an_argument_goes_before_it(make: Any) -> None:
    with dask.config.set({"distmm.precision": "medium", "distmm.kernel": "cpu"}):
        assert (make().precision, make().kernel) == ("medium", "cpu")
        assert make(precision="ieee").precision == "ieee"
    assert (make().precision, make().kernel) == ("highest", None)


def planned(product: Any) -> distmm.Plan:
    """The plan of a lazy product."""
    (plan,) = {id(layer.plan): layer.plan for layer in product.dask.layers.values() if hasattr(layer, "plan")}.values()
    assert isinstance(plan, distmm.Plan)
    return plan


def test_a_configured_device_is_the_default() -> None:
    with dask.config.set({"distmm.device": "gpu"}):
        with pytest.raises(InputError, match=r"GPU|cuda"):
            distmm.plan(A, A, kernel="cpu")
        assert distmm.plan(A, A, device="cpu").cluster.device == "cpu"


def test_a_configured_check_is_that_of_jobs(tmp_path: Path, client: Any) -> None:
    with dask.config.set({"distmm.check": "none"}):
        assert "not checked" in str(distmm.multiply(A, A, tmp_path / "c.npy", client=client).rows())
        checked = distmm.multiply(A, A, tmp_path / "d.npy", client=client, check="freivalds")
    assert "not checked" not in str(checked.rows())


@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        ("precision", "lowest", lambda: distmm.matmul(A, A)),
        ("precision", None, lambda: distmm.gram(A)),
        ("precision", "lowest", lambda: distmm.verify(A, A, A @ A)),
        ("device", "tpu", lambda: distmm.gemm(1, A, A)),
        ("device", ["cpu"], lambda: distmm.plan(A, A)),
        ("kernel", 3, lambda: distmm.matmul(A, A)),
        ("kernel", "fastest", lambda: distmm.matmul(A, A)),
        ("check", "some", lambda: distmm.multiply(A, A, "c.npy")),
        ("check", False, lambda: distmm.multiply(A, A, "c.npy")),
        ("device", "tpu", lambda: distmm.resume("c.npy")),
        ("accelerate.min-flops", "many", lambda: accelerated()),
        ("accelerate.min-flops", None, lambda: accelerated()),
        ("accelerate.min-flops", -1, lambda: accelerated()),
        ("precision", "lowest", lambda: accelerated()),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_the_name_of_its_setting(
    name: str, value: Any, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with dask.config.set({f"distmm.{name}": value}), pytest.raises(InputError, match=f"has distmm.{name}: .*which is "):
        call()
    assert not list(tmp_path.iterdir())


def test_the_refusal_of_a_kernel_says_that_null_is_allowed() -> None:
    with dask.config.set({"distmm.kernel": "fastest"}), pytest.raises(InputError, match="tiled, or null for the fast"):
        distmm.matmul(A, A)


def accelerated() -> Any:
    with distmm.accelerated():
        return da.from_array(A) @ A


def test_a_bad_setting_with_several_words_is_named_as_environment_variables_name_it() -> None:
    variable = "environment variable DASK_DISTMM__ACCELERATE__MIN_FLOPS or"
    with dask.config.set({"distmm.accelerate.min-flops": "many"}), pytest.raises(InputError, match=variable):
        accelerated()


@pytest.mark.parametrize("text", ["1e3", "1000", "2e3"])
def test_a_number_of_operations_may_be_a_text_as_it_is_in_yaml(text: str) -> None:
    with dask.config.set({"distmm.accelerate.min-flops": text}):
        assert accelerated().name.startswith("distmm") == (float(text) <= 2 * 8**3)


def test_an_unknown_argument_is_not_called_a_setting() -> None:
    with pytest.raises(InputError, match=r"^precision 'lowest' is not one of"):
        distmm.matmul(A, A, precision="lowest")  # type: ignore[arg-type]


def test_files_and_environment_variables_are_read_as_dask_reads_them(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"distmm": {"precision": "high", "device": "cpu"}}))
    told = (
        "import dask, distmm; print(*(dask.config.get('distmm.' + name) for name in ('precision', 'device', 'check')))"
    )
    environment = {"DASK_CONFIG": str(tmp_path), "DASK_DISTMM__CHECK": "full", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["high", "cpu", "full"]


@pytest.mark.parametrize(
    ("function", "settings"),
    [(f, ("precision", "kernel", "device")) for f in (distmm.matmul, distmm.gemm, distmm.gram, distmm.plan)]
    + [
        (distmm.multiply, ("precision", "kernel", "device", "check")),
        (distmm.verify, ("precision",)),
        (distmm.resume, ("device",)),
    ],
)
def test_arguments_with_a_setting_have_no_other_default(function: Any, settings: tuple[str, ...]) -> None:
    parameters = inspect.signature(function).parameters
    assert all(parameters[name].default is None for name in settings)


def test_the_reference_has_every_setting_and_its_default() -> None:
    page = (Path(distmm.__file__).parents[1] / "deploy/site/pages/reference/configuration.md").read_text()
    rows = re.findall(r"^\| `distmm\.([\w.-]+)` \| `([\w.]+)` \|", page, re.MULTILINE)
    found: dict[str, Any] = {}
    dask.config.set({name: yaml.safe_load(default) for name, default in rows}, config=found)
    assert found == config.DEFAULTS
