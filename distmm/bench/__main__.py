"""``python -m distmm.bench``: the process that `distmm.bench.run` starts; users type ``distmm bench scaling``."""

import sys

from distmm.bench.measuring_process import main

if __name__ == "__main__":
    sys.exit(main())
