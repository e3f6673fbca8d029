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

# Values of those settings that have a few.
ALLOWED: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "device": ("auto", "cpu", "gpu"),
    "check": ("freivalds", "full", "none"),
}


def chosen(name: str, given: Any) -> Any:
    """Return an argument as the caller has given it; for None the configured default.

    Raises
    ------
    InputError
        For a configured value that the argument cannot have; names the setting. What the caller gives is not looked at.
    """
    if given is not None:
        return given
    value = dask.config.get(f"distmm.{name}", DEFAULTS[name])
    if name in ALLOWED and value not in ALLOWED[name]:
        what = f"which is not one of {', '.join(ALLOWED[name])}"
    elif name == "kernel" and not isinstance(value, (str, type(None))):
        what = "which is no kernel's name: use one that distmm info lists, or null"
    else:
        return value
    raise InputError(
        f"Dask's configuration has distmm.{name}: {value!r}, {what}; correct it in the YAML file, in the environment "
        f"variable DASK_DISTMM__{name.upper()} or in dask.config.set, wherever it is set"
    )
