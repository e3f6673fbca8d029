"""Defaults of arguments: the ``distmm`` section of Dask's configuration.

The file ``distmm.yaml`` next to this module has the values for settings that the user leaves unset. Users set them in a
YAML file that Dask reads, in an environment variable such as ``DASK_DISTMM__PRECISION``, or by ``dask.config.set``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import yaml
from dask.utils import parse_bytes

from distmm.errors import InputError
from distmm.planning.precision import PRECISIONS

DEFAULTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("distmm.yaml").read_text(encoding="utf-8"))["distmm"]

dask.config.update_defaults({"distmm": DEFAULTS})

# Settings with a fixed set of values. The names of kernels are a further set (`_allowed`).
ALLOWED: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "device": ("auto", "cpu", "gpu"),
    "check": ("freivalds", "full", "none"),
}

# Least and largest share of a GPU's memory for `gpu-pool`. The CUDA context, cuBLAS and UCX take what is left.
LEAST_POOL, MOST_POOL = 0.01, 0.95


def chosen(name: str, given: Any = None) -> Any:
    """Return the caller's value of a setting, or the configured value if the caller gave none.

    Parameters
    ----------
    name : str
        The setting without ``distmm.``, such as ``"precision"``.
    given : object, optional
        The caller's value.

    Returns
    -------
    object
        `given` if it is not None, else the configured value.

    Raises
    ------
    InputError
        If the value is not valid for this setting. A caller's value is checked if the setting has a fixed set of them.
    """
    if given is not None:
        if (names := _allowed(name)) and (not isinstance(given, str) or given not in names):
            raise InputError(f"{name} {given!r} is not one of {', '.join(names)}")
        return given
    value = dask.config.get(f"distmm.{name}", dask.config.get(name, config=DEFAULTS))
    if name == "kernel" and value is None:
        return value
    if (names := _allowed(name)) and value not in names:
        null = ", or null for the fastest" if name == "kernel" else ""
        what = f"which is not one of {', '.join(names)}{null}"
    elif name == "reproducible" and not isinstance(value, bool):
        what = "which is neither true nor false"
    elif name == "gpu-pool" and not _is_pool(value):
        what = f"which is neither a share from {LEAST_POOL} to {MOST_POOL} nor a size: use one such as 0.5 or 8GB"
    elif name == "accelerate.min-flops" and not _is_count(value):
        what = "which is not a number of operations: use one such as 1e8, or 0 for all products"
    else:
        return value
    variable = f"DASK_DISTMM__{name.upper().replace('.', '__').replace('-', '_')}"
    raise InputError(
        f"Dask's configuration has distmm.{name}: {value!r}, {what}; correct it in the YAML file, in the environment "
        f"variable {variable} or in dask.config.set, wherever it is set"
    )


def _allowed(name: str) -> tuple[str, ...]:
    """Return the values of a setting that has a fixed set of them; an empty tuple for other settings."""
    if name == "kernel":
        from distmm_kernels.candidates import CANDIDATES  # late: the table takes 0.2 s, and few users name a kernel

        return tuple(sorted(each.name for each in CANDIDATES))
    return ALLOWED.get(name, ())


def _is_pool(value: Any) -> bool:
    """Whether a value is a share of a GPU's memory or a size. Either may be text."""
    if _is_count(value):
        return LEAST_POOL <= float(value) <= MOST_POOL
    try:
        return isinstance(value, str) and parse_bytes(value) >= 1 << 20
    except (ValueError, OverflowError):
        return False


def _is_count(value: Any) -> bool:
    """Whether a value is a number of at least 0; YAML reads 1e8 as text."""
    try:
        return not isinstance(value, bool) and float(value) >= 0
    except (TypeError, ValueError):
        return False
