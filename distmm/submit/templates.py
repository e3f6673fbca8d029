"""Templates of batch scripts and manifests: the files beside this module, in the language of Jinja."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = ["render"]


def render(template: str, **values: Any) -> str:
    """Return the text of a template. A value that it needs and does not get is an error."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "ensure_ascii": False}
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(values)
