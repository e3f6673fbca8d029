"""``python -m experiment``: the process that `experiment.run` starts."""

import sys

from experiment.measuring_process import main

if __name__ == "__main__":
    sys.exit(main())
