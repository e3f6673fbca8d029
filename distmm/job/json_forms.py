"""The form of each JSON file beside C, and a check of it: a damaged file ends in a message, not in a traceback."""

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
ROW = {"count": int, "sums": dict}  # what the marker of a block row has, too
COMMON = {"format": int, "spec": SPEC, "output": OUTPUT, "blocks": [int], "layers": int, "plan": str, "seed": int,
          "rejected": int, "runs": [RUN]}  # fmt: skip
MANIFEST = COMMON
CERTIFICATE = {**COMMON, "largest_residual": (int, float, None), "done": [MARKER]}


def wrong(content: Any, form: Any, place: str = "") -> Iterator[str]:
    """Name each part that does not have its form.

    A form is a type, a tuple of types (None may be one of them), a list that holds the form of its items, or a dict
    that holds the form of each entry.
    """
    if isinstance(form, dict):
        if not isinstance(content, dict):
            yield f"{place or 'it'} is no table"
            return
        for name, part in form.items():
            if name not in content:
                yield f"{place}{name} is missing"
            else:
                yield from wrong(content[name], part, f"{place}{name}.")
    elif isinstance(form, list):
        if not isinstance(content, list):
            yield f"{place.rstrip('.')} is no list"
            return
        for n, item in enumerate(content):
            yield from wrong(item, form[0], f"{place}{n}.")
    elif not any(_is(content, kind) for kind in (form if isinstance(form, tuple) else (form,))):
        yield f"{place.rstrip('.')} is {str(content)[:40]!r}"


def _is(content: Any, kind: Any) -> bool:
    return (
        content is None if kind is None else isinstance(content, kind) and (kind is bool) == isinstance(content, bool)
    )
