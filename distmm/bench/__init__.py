"""How products scale with the number of GPUs (or CPU workers) of one host, beside other programs, in one run.

`cases` lists what is measured. `run` starts a process for each program (`measuring_process`). `results` holds the
figures: as a table, JSON, a picture. The programs: `dask_programs` (distmm, `dask.array.matmul`), `jax_product`,
`cublasxt`, `numpy_product`.
"""

from distmm.bench.cases import PLACES, Case, Experiment, weak_size
from distmm.bench.results import Results, Row, efficiency
from distmm.bench.run import run

__all__ = ["PLACES", "Case", "Experiment", "Results", "Row", "efficiency", "run", "weak_size"]
