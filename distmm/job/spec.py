"""The specification of a job: its operands and options, as Python objects in a run, and as JSON in the manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from dask.base import tokenize

from distmm import config
from distmm.checking.verdict import Verdict
from distmm.errors import InputError
from distmm.job.folder import Folder, Json
from distmm.job.records import names_of_arrays
from distmm.job.reduction import Reduction, from_json
from distmm.planning.problem import Problem, result_type
from distmm.product.aliasing import lies_in
from distmm.product.array_types import check_sendable, is_dask
from distmm.product.choices import Choices
from distmm.product.operand import Operand, wrap
from distmm.product.operand_pair import check_pair
from distmm.product.reduction_limits import check_ordered
from distmm.product.scalars import check_represents, common_type, plain
from distmm.storage import is_url, open_matrix
from distmm.storage.matrix import Matrix, check_dtype

if TYPE_CHECKING:
    from distmm.job.contents import Contents

Check = Literal["freivalds", "full", "none"]

# The caller's choices that a manifest has: a job keeps them until its end.
KEPT = ("precision", "kernel", "reproducible")

DEFAULTS = Choices()


@dataclass(frozen=True)
class Spec:
    """The product ``C = alpha op(A) @ op(B) + beta C0``.

    Attributes
    ----------
    a, b : Operand
        Matrices on disk, or arrays.
    c0 : Operand or None
        None if beta is 0.
    alpha, beta : scalars
    dtype : numpy.dtype
        Type of C.
    check : {"freivalds", "full", "none"}
        As in `distmm.multiply`.
    choices : Choices
        The caller's precision, kernel and device, blocks and plan.
    reduction : TopK or Threshold or None
        The reduction of each row of C. None: all of C is written.
    """

    a: Operand
    b: Operand
    c0: Operand | None
    alpha: complex
    beta: complex
    dtype: np.dtype[Any]
    check: Check
    choices: Choices
    reduction: Reduction | None = None

    @classmethod
    def of(
        cls,
        a: Any,
        b: Any,
        c0: Any,
        choices: Choices = DEFAULTS,
        *,
        transa: bool = False,
        transb: bool = False,
        alpha: complex = 1,
        beta: complex = 0,
        dtype: Any = None,
        check: Check = "freivalds",
        reduction: Reduction | None = None,
    ) -> Spec:
        """Open the matrices that are given as paths, and check shapes, types and scalars.

        Raises
        ------
        InputError
            With the value, and what to give instead.
        """
        first, second = _operand(a, "A", transa), _operand(b, "B", transb)
        check_pair(first, second)
        added = _operand(c0, "C", False) if beta != 0 else None
        shape = (first.shape[0], second.shape[1])
        if check == "full" and beta != 0:
            raise InputError(
                f"check is full and beta is {beta}: a full check does not support beta; use freivalds or none"
            )
        if added is not None and added.shape != shape:
            raise InputError(f"C has shape {added.shape}, the product {shape}: with beta, give a C of that shape")
        for name, value in (("precision", choices.precision), ("check", check)):
            config.chosen(name, value)
        types = {x.name: x.dtype for x in (first, second, added) if x is not None}
        natural = common_type(types, alpha=alpha, beta=beta)
        alpha, beta = plain(alpha), plain(beta)  # only the type of C depends on whether they are NumPy's
        of_c = natural if dtype is None else check_dtype("C", dtype)
        if (natural.kind == "c" and of_c.kind != "c") or (natural.kind not in "iub" and of_c.kind in "iub"):
            raise InputError(
                f"C should be {of_c}, but the product is {natural}, which {of_c} cannot represent: choose another dtype"
            )
        check_represents(of_c, alpha=alpha, beta=beta)
        if reduction is not None:
            check_ordered(natural, "reduction")
            _check_reduced(reduction, first, second, check)
            of_c = reduction.dtype(of_c)
        return cls(first, second, added, alpha, beta, of_c, check, choices, reduction)

    @property
    def contents(self) -> Contents:
        """What the job keeps of the product."""
        from distmm.job.contents import Contents  # late: it writes Zarr arrays, and a plan writes none

        return Contents(self.reduction, self.dtype, (self.a.shape[0], self.b.shape[1]))

    @property
    def problem(self) -> Problem:
        """The product, in the type of the computation, which is never narrower than its operands or C.

        Blocks that are reduced may be wider: those of a metric have the type of the accumulator.
        """
        wide = result_type(self.a.dtype, self.b.dtype, *([self.dtype] if self.reduction is None else []))
        return Problem(self.a.shape[0], self.a.shape[1], self.b.shape[1], wide)

    @property
    def inputs(self) -> list[Matrix]:
        """Those of A and B that are on disk."""
        return [x.source for x in (self.a, self.b) if isinstance(x.source, Matrix)]

    def json(self) -> Json:
        """Describe it for the manifest. A job can be resumed only if this description is the same."""
        return {
            "A": _facts(self.a),
            "B": _facts(self.b),
            "C0": None if self.c0 is None else _facts(self.c0),
            "alpha": _number(self.alpha),
            "beta": _number(self.beta),
            "dtype": self.dtype.name,
            "reduction": None if self.reduction is None else self.reduction.json(),
            "check": self.check,
            **{name: getattr(self.choices, name) for name in KEPT},
        }

    def files(self, again: bool = False) -> Json:
        """Describe the files of A, B and C0, as they were when they were opened, or as they are now (`again`).

        Raises
        ------
        InputError
            If a file is missing.
        """
        stored = {name: x for name, x in self.operands.items() if isinstance(x.source, Matrix)}
        if again:
            stored = {name: replace(x, source=open_matrix(x.source.path)) for name, x in stored.items()}
        return {name: {**_facts(x), "stamp": x.source.stamp()} for name, x in stored.items()}

    def reads(self, path: str) -> list[str]:
        """Return the names of the operands that are in the file or folder `path`."""
        return [name for name, operand in self.operands.items() if lies_in(operand.source, path)]

    def refuse(self, out: str, overwrite: bool) -> None:
        """Refuse an output that would damage other data, or replace A or B, before any work.

        Raises
        ------
        InputError
            With the reason, and what to give instead.
        """
        self.contents.refuse(out, overwrite)
        if is_url(out) and self.check == "full":
            raise InputError(
                f"{out}: a full check renames a wrong C, but an object store has no rename: use check freivalds, and "
                f"distmm verify A B C --check full when C is complete"
            )
        folder = Folder.of(out)
        folder.check_names()
        # A job replaces C0, which it reads, only at its end. An object store has no rename: there C is removed first.
        names = [name for name in self.reads(folder.target) if name != "C0" or is_url(out)]
        names += self.reads(folder.path)
        if names:
            raise InputError(
                f"{folder.target}: the product reads {' and '.join(names)} from there, and would replace it: give "
                f"another name for the result"
            )

    def verify(self, c: Matrix, **how: Any) -> Verdict:
        """Compare C with A and B, as `distmm.verify` does."""
        from distmm.product.verification import verdict  # late: it needs Dask arrays, and a plan of files does not

        return verdict(self.a, self.b, wrap(c, "C"), alpha=self.alpha, precision=self.choices.precision, **how)

    @property
    def operands(self) -> dict[str, Operand]:
        """A, B and, if it is added, C0."""
        named = {"A": self.a, "B": self.b, "C0": self.c0}
        return {name: operand for name, operand in named.items() if operand is not None}

    @classmethod
    def from_json(cls, content: Json, choices: Choices = DEFAULTS) -> Spec:
        """Return the specification in a manifest, and open its matrices. The other `choices` are not in a manifest.

        Raises
        ------
        InputError
            For matrices that are missing, or that were arrays of a Python program.
        """
        for name in names_of_arrays(content):
            raise InputError(
                f"{name} of this job was an array in a Python program, not a file: to continue, make the same call in "
                f"that program again"
            )
        a, b, c0 = content["A"], content["B"], content["C0"]
        return cls.of(
            a["path"], b["path"], c0 and c0["path"], replace(choices, **{name: content[name] for name in KEPT}),
            transa=a["transposed"], transb=b["transposed"],
            alpha=_scalar(content["alpha"]), beta=_scalar(content["beta"]), dtype=np.dtype(content["dtype"]),
            check=content["check"], reduction=from_json(content["reduction"]),
        )  # fmt: skip


def _check_reduced(reduction: Reduction, a: Operand, b: Operand, check: Check) -> None:
    """Refuse operands and checks that a reduced product does not allow."""
    for x in (a, b):
        if is_dask(x.source):
            raise InputError(
                f"{x.name} is a Dask array, and each block row of a reduced product reads all of B: store {x.name} "
                f"(x.to_zarr), and give its path"
            )
    if check == "full":
        raise InputError("a full check needs all elements of C, which a reduction does not keep: use check freivalds")
    reduction.check(a, b)


def differences(before: Json, now: Json) -> Iterator[str]:
    """Yield a text for each difference between two descriptions, with both values. Links are other names of a path."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from (f"{name}: {what}" for what in differences(old, new))
        elif name == "path" and os.path.realpath(old or "") == os.path.realpath(new or ""):
            continue
        elif old != new and repr(old) != repr(new):  # NaN is not equal to itself
            yield f"{name} was {old}, is {new}"


def _operand(source: Any, name: str, transposed: bool) -> Operand:
    """Open and check an operand. Dask arrays get equal chunks, as the blocks of jobs are equal."""
    if isinstance(source, (str, os.PathLike)):
        source = open_matrix(source)
    operand = wrap(source, name, transposed)
    check_sendable(operand.source, name)
    if len(operand.shape) != 2:
        raise InputError(f"{name} has shape {operand.shape}: a job multiplies matrices; use distmm.matmul for stacks")
    if is_dask(source) and any(len(set(c[:-1])) > 1 for c in source.chunks):
        return replace(operand, source=source.rechunk(tuple(max(c) for c in source.chunks), method="tasks"))
    return operand


def _facts(operand: Operand) -> Json:
    """Describe an operand for the manifest."""
    source = operand.source
    if isinstance(source, Matrix):
        facts = source.fingerprint()
    else:
        facts = {
            "array": tokenize(source),
            "shape": [int(n) for n in source.shape],
            "dtype": np.dtype(source.dtype).name,
        }
    return {**facts, "transposed": operand.transposed}


def _number(value: complex) -> Any:
    """Return a scalar as JSON."""
    return [value.real, value.imag] if isinstance(value, complex) else value


def _scalar(value: Any) -> complex:
    """Return the scalar that `_number` has converted."""
    return complex(*value) if isinstance(value, list) else value
