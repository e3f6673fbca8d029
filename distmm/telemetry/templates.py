"""The files of `pages/`: HTML of page and report, filled in by Jinja, and the page's style sheet and script."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = ["filled", "text"]

PAGES = Path(__file__).parent / "pages"


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def filled(template: str, /, **values: Any) -> str:
    """Return a template with its values. Texts are escaped; `markupsafe.Markup` stays as it is."""
    return _environment().get_template(template).render(values)


def text(name: str) -> str:
    """Return a file as it is."""
    return (PAGES / name).read_text(encoding="utf-8")
