"""How products scale with the number of GPUs (or CPU workers) of one host.

`cases` lists what is measured. `run` starts a process for each program and number of workers (`measuring_process`).
`products` multiplies by distmm; other programs can be measured in the same run (``tests/bench/peers``). `results` holds
the measurements, as a table and as JSON; `picture` draws them.
"""

from experiment.cases import DISTMM, PLACES, Case, Experiment, Program, weak_size
from experiment.results import Results, Row, efficiency
from experiment.run import run

__all__ = ["DISTMM", "PLACES", "Case", "Experiment", "Program", "Results", "Row", "efficiency", "run", "weak_size"]
