"""GPU models by name: the figures that plans need for GPUs of another machine.

A model that is in `distmm_kernels/rates.toml` has its measured rates there. For the others the planned rate is that of
the H200 times the ratio of the two models' peaks, for the unit that the kernel uses. The peaks are those of NVIDIA's
data sheets, without sparsity.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from distmm.errors import InputError


class GpuModel(NamedTuple):
    """A GPU model.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    memory : int
        Bytes of the variant with the most memory.
    fp32, fp64, fp64_tensor, fp16_tensor : float
        Peaks in TFLOP/s. Without float64 tensor cores, `fp64_tensor` is equal to `fp64`.
    pcie : int
        Generation of PCI Express to the host, with 16 lanes.
    nvlink : bool
        Whether NVLink connects all GPUs of a host.
    measured : str or None
        The driver's name of the model, if `rates.toml` has rates of it.
    """

    capability: tuple[int, int]
    memory: int
    fp32: float
    fp64: float
    fp64_tensor: float
    fp16_tensor: float
    pcie: int
    nvlink: bool
    measured: str | None = None


with Path(__file__).with_suffix(".toml").open("rb") as _file:
    MODELS = {
        name: GpuModel(**{**row, "capability": tuple(row["capability"])}) for name, row in tomllib.load(_file).items()
    }

MEASURED = MODELS["H200"]

# Fraction of a Hopper GPU's peak that mma.sync reaches; wgmma reaches the peak (Luo et al., arXiv 2402.13499; our
# mma.sync kernel reaches 0.46 on an H200). On Ampere and Ada, mma.sync is the fastest instruction, and its fraction is
# 1. Blackwell has a faster instruction (tcgen05), and its rate by mma.sync is not published. Plans assume that of a
# Hopper GPU with as many multiprocessors and the same clock.
MMA_SYNC_ON_HOPPER = 0.63


def model_named(name: str) -> GpuModel:
    """Return the GPU model with this name; upper and lower case are the same.

    Raises
    ------
    InputError
        For an unknown name. The message lists the known ones.
    """
    by_name = {known.casefold(): model for known, model in MODELS.items()}
    if not isinstance(name, str) or name.casefold() not in by_name:
        raise InputError(
            f"model {name!r} is not a GPU model that plans know: use one of {', '.join(MODELS)}; if yours is missing, "
            "use the most similar one"
        )
    return by_name[name.casefold()]


def share_of_measured(model: GpuModel, unit: str, accumulator: str) -> float:
    """Return a kernel's rate on a model divided by its rate on the H200, by their peaks.

    Parameters
    ----------
    model : GpuModel
    unit : {"plain", "fp64_tensor", "tensor", "mma_sync"}
        Unit of its multiply-adds: `distmm_kernels.candidate.Unit`. The ratios of the peaks of TF32, 16-bit types and
        int8 are the same on all of these models.
    accumulator : str
        Type of its sums, such as "f4" and "c16". Integers count as float32: separate integer units have half the rate
        of float32 on every model.

    Returns
    -------
    float
    """
    if unit == "mma_sync":
        return _by_mma_sync(model) / _by_mma_sync(MEASURED)
    plain = "fp64" if accumulator in ("f8", "c16") else "fp32"
    peak = {"tensor": "fp16_tensor", "fp64_tensor": "fp64_tensor"}.get(unit, plain)
    return getattr(model, peak) / getattr(MEASURED, peak)


def _by_mma_sync(model: GpuModel) -> float:
    """Return the peak of 16-bit types by mma.sync in TFLOP/s; the float32 peak gives the number of multiprocessors."""
    if model.capability < (9, 0):
        return model.fp16_tensor
    return MMA_SYNC_ON_HOPPER * MEASURED.fp16_tensor * model.fp32 / MEASURED.fp32
