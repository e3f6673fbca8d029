"""The required form of each JSON file next to C. A damaged file gives a clear error. Files may have more keys."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, InstanceOf, model_validator

Number = int | float | list[float]  # a complex number is a list


class Form(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(strict=True, defer_build=True)


class Sums(Form):
    """Checksums of the inputs of a unit."""

    A: str
    B: str


class Marker(Form):
    """The marker of a unit. Those of a reduced product have the number of lines, and a checksum for each array."""

    i: int
    j: int
    crc32c: int
    inputs: Sums
    count: int | None = None
    sums: dict[str, int] | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.count is None) != (self.sums is None):
            raise ValueError("count or sums is missing")
        return self


class Operand(Form):
    """A, B or C0."""

    transposed: bool


class Spec(Form):
    """The description of a product."""

    A: Operand
    B: Operand
    C0: dict[str, Any] | None
    alpha: Number
    beta: Number
    dtype: str
    precision: str
    kernel: str | None
    check: str
    reduction: dict[str, Any] | None
    reproducible: bool


class Output(Form):
    """The result. Its name may have bytes that are not UTF-8, which pydantic's own strings refuse."""

    name: InstanceOf[str]
    shape: list[int]
    dtype: str
    overwrite: bool


class Run(Form):
    """One run of a job."""

    started: float
    device: str


class Manifest(Form):
    """The manifest of a job."""

    format: int
    spec: Spec
    output: Output
    blocks: list[int]
    layers: int
    plan: str
    seed: int
    missing: dict[str, str]
    stamps: dict[str, str]
    rejected: int
    runs: list[Run]


class Certificate(Manifest):
    """The certificate of a complete C."""

    largest_residual: float | None
    done: list[Marker]
