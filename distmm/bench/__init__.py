"""How products scale with the number of GPUs (or CPU workers) of one host, beside other programs, in one run.

`cases` says what is measured, `run` has each program measured in a process of its own (`child`), `results` holds what
came out: a table, JSON, a picture. The programs: `on_cluster` (distmm, `dask.array.matmul`), `jax_product`,
`cublasxt`, `numpy_product`.
"""

from distmm.bench.cases import Case, Experiment, weak_size
from distmm.bench.results import Results, Row, efficiency
from distmm.bench.run import run

__all__ = ["Case", "Experiment", "Results", "Row", "efficiency", "run", "weak_size"]
