"""Fills in the templates of pages, batch scripts and manifests, by Jinja."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape


@cache
def _environment(folder: Path) -> Environment:
    made = Environment(
        loader=FileSystemLoader(folder), autoescape=select_autoescape(["css", "html"]), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.policies["json.dumps_kwargs"] = {"sort_keys": False, "ensure_ascii": False}
    made.filters["quote"] = lambda value: shlex.quote(str(value))
    return made


def filled(template: Path, /, **values: Any) -> str:
    """Return the text of a template. A value that it needs and does not get is an error.

    In HTML and CSS texts are escaped; `markupsafe.Markup` stays as it is.
    """
    return _environment(template.parent).get_template(template.name).render(values)
