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
    del sys.argv[0]
    script = Path(*sys.argv[:1])
    if not script.is_file():
        sys.exit(f"{script} is no file; {USAGE}")
    try:
        accelerate()
    except InputError as error:
        sys.exit(str(error))
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
