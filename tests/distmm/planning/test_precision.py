"""One list of precisions: everything that takes one takes the same, and says so in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from typer.testing import CliRunner

import distmm
from distmm.cli.app import app
from distmm.errors import InputError
from distmm.job.spec import Spec
from distmm.planning.precision import PRECISIONS, Precision
from distmm.product.choices import Choices
from distmm.submit.schema import Product
from distmm_kernels.tolerance import ROUNDOFF

A = np.ones((4, 4), "f4")

TAKERS: list[Callable[[Any], Any]] = [
    lambda precision: distmm.matmul(A, A, precision=precision),
    lambda precision: distmm.gemm(1, A, A, precision=precision),
    lambda precision: distmm.gram(A, precision=precision),
    lambda precision: distmm.plan(A, A, precision=precision),
    lambda precision: distmm.verify(A, A, 4 * A, precision=precision),
    lambda precision: Spec.of(A, A, None, Choices(precision=precision)),
]


@pytest.mark.parametrize("take", TAKERS)
def test_what_takes_a_precision_takes_all_and_refuses_others_in_the_same_words(take: Callable[[Any], Any]) -> None:
    for precision in PRECISIONS:
        take(precision)
    for wrong in ("Highest", "", 32):  # None is the configured default
        with pytest.raises(InputError) as refused:
            take(wrong)
        assert str(refused.value) == f"precision {wrong!r} is not one of highest, high, medium, ieee"


def test_kernels_and_checks_know_the_same_precisions() -> None:
    from distmm_kernels import config

    assert config.PRECISIONS == PRECISIONS == get_args(Precision)
    assert set(ROUNDOFF) == set(PRECISIONS)


def test_the_command_line_and_job_files_know_the_same_precisions() -> None:
    refused = CliRunner().invoke(app, ["plan", "A.npy", "B.npy", "--precision", "lowest"])
    assert refused.exit_code == 2
    assert ", ".join(f"'{precision}'" for precision in PRECISIONS) in " ".join(refused.output.replace("│", " ").split())
    assert get_args(Product.model_fields["precision"].annotation) == PRECISIONS
