"""The reference of the command line: Typer's description of each command is added to the page `cli`."""

from __future__ import annotations

import re
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
    # The page lists the exit codes itself, and its table of contents lists the commands.
    text = re.sub(r"^Exit codes:.*?(?=^## )", "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    source[0] += "\n#" + text.replace("```console\n$ ", "```sh\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Extend Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
