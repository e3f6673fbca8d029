"""``python -m distmm.accelerate script.py [arguments]``: a script whose Dask products run on distmm."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from distmm.accelerate import accelerate
from distmm.errors import InputError

USAGE = "usage: python -m distmm.accelerate script.py [arguments of the script]"


def main() -> None:
    """Run a script as ``python script.py`` does: the same arguments, and its folder first in the path."""
    script, *arguments = sys.argv[1:] or ["--help"]
    if script in ("-h", "--help"):
        print(USAGE)  # noqa: T201  what was asked for
        return
    if not Path(script).is_file():
        sys.exit(f"{script} is no file; {USAGE}")
    try:
        accelerate()
    except InputError as error:
        sys.exit(str(error))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
