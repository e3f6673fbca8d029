"""The required form of each JSON file next to C, and a check of it, so that a damaged file gives a clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["CERTIFICATE", "MANIFEST", "MARKER", "ROW", "wrong"]

OPERAND = {"transposed": bool}
SPEC = {
    "A": OPERAND, "B": OPERAND, "C0": (dict, None), "alpha": (int, float, list), "beta": (int, float, list),
    "dtype": str, "precision": str, "kernel": (str, None), "check": str,
}  # fmt: skip
OUTPUT = {"name": str, "shape": [int], "dtype": str, "overwrite": bool}
RUN = {"started": (int, float), "device": str}
MARKER = {"i": int, "j": int, "crc32c": int, "inputs": {"A": str, "B": str}}
ROW = {"count": int, "sums": dict}  # further keys in the marker of a block row
COMMON = {"format": int, "spec": SPEC, "output": OUTPUT, "blocks": [int], "layers": int, "plan": str, "seed": int,
          "rejected": int, "runs": [RUN]}  # fmt: skip
MANIFEST = COMMON
CERTIFICATE = {**COMMON, "largest_residual": (int, float, None), "done": [MARKER]}


def wrong(content: Any, form: Any, place: str = "") -> Iterator[str]:
    """Yield a text for each part of `content` that does not have its form.

    Parameters
    ----------
    content : Any
    form : type, tuple, list or dict
        A type; a tuple of types, which may include None; a list with the form of its items; or a dict with the form of
        each entry.
    place : str
        Name of this part, for the text.
    """
    if isinstance(form, dict):
        if not isinstance(content, dict):
            yield f"{place or 'it'} is not an object"
            return
        for name, part in form.items():
            if name not in content:
                yield f"{place}{name} is missing"
            else:
                yield from wrong(content[name], part, f"{place}{name}.")
    elif isinstance(form, list):
        if not isinstance(content, list):
            yield f"{place.rstrip('.')} is not a list"
            return
        for n, item in enumerate(content):
            yield from wrong(item, form[0], f"{place}{n}.")
    elif not any(_is(content, kind) for kind in (form if isinstance(form, tuple) else (form,))):
        yield f"{place.rstrip('.')} is {str(content)[:40]!r}"


def _is(content: Any, kind: Any) -> bool:
    return (
        content is None if kind is None else isinstance(content, kind) and (kind is bool) == isinstance(content, bool)
    )
