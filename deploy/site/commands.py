"""The reference of the command line: what Typer says of the application, in place of the text of one page."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from sphinx.application import Sphinx

PAGE = "reference/cli"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    if page != PAGE:
        return
    command = [sys.executable, "-m", "typer", "distmm.cli.app", "utils", "docs", "--name", "distmm"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=app.srcdir).stdout
    body = text.partition("\n")[2]  # the title is the page's own
    source[0] += body.replace("```console\n$ ", "```sh\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Extend Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
