"""Defaults of arguments: the ``distmm`` section of Dask's configuration.

The file ``distmm.yaml`` beside this module has the values that hold where the user sets none: in a YAML file that Dask
reads, in an environment variable such as ``DASK_DISTMM__PRECISION``, or by ``dask.config.set``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import yaml

from distmm.errors import InputError
from distmm.planning.precision import PRECISIONS

__all__ = ["DEFAULTS", "chosen"]

DEFAULTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("distmm.yaml").read_text(encoding="utf-8"))["distmm"]

dask.config.update_defaults({"distmm": DEFAULTS})

# Settings that have one of a few values.
ALLOWED: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "device": ("auto", "cpu", "gpu"),
    "check": ("freivalds", "full", "none"),
}


def chosen(name: str, given: Any = None) -> Any:
    """Return an argument as the caller has given it; for None, and for what is no argument, the configured value.

    Raises
    ------
    InputError
        For a configured value that the argument cannot have; names the setting. What the caller gives is not looked at.
    """
    if given is not None:
        return given
    value = dask.config.get(f"distmm.{name}", dask.config.get(name, config=DEFAULTS))
    if name in ALLOWED and value not in ALLOWED[name]:
        what = f"which is not one of {', '.join(ALLOWED[name])}"
    elif name == "kernel" and not isinstance(value, (str, type(None))):
        what = "which is no kernel's name: use one that distmm info lists, or null"
    elif name == "reproducible" and not isinstance(value, bool):
        what = "which is neither true nor false"
    elif name == "accelerate.min-flops" and not _is_count(value):
        what = "which is no number of operations: use one such as 1e8, or 0 for all products"
    else:
        return value
    variable = f"DASK_DISTMM__{name.upper().replace('.', '__').replace('-', '_')}"
    raise InputError(
        f"Dask's configuration has distmm.{name}: {value!r}, {what}; correct it in the YAML file, in the environment "
        f"variable {variable} or in dask.config.set, wherever it is set"
    )


def _is_count(value: Any) -> bool:
    """Whether a value is a number from 0; 1e8 in YAML is a text."""
    try:
        return not isinstance(value, bool) and float(value) >= 0
    except (TypeError, ValueError):
        return False
