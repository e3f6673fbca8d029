"""The functions that Dask runs on workers, one idea a module, and what their arguments say.

Kernels are imported inside the function bodies: client and scheduler import these modules without Numba and without a
GPU. No function writes into its arguments, because a task may run twice (a retry, a lost result): accumulation in place
would then count a product twice.
"""

from distmm.worker.gpu_copies import to_host
from distmm.worker.tasks.arrivals import Arrivals, arrived, arrived_at
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_facts, measure, measure_kernels
from distmm.worker.tasks.largest import topk_of_chunk
from distmm.worker.tasks.loads import Load, load, to_device
from distmm.worker.tasks.metrics import METRICS, Metric, exponents, needs_exponents, squared_norms
from distmm.worker.tasks.probe import PAUSE_FRACTION, WORKER_BYTES, copy_rate, cores_of, local_gpu, probe
from distmm.worker.tasks.products import combine, mirror, multiply, multiply_and_store, part
from distmm.worker.tasks.reductions import (
    BlockReduction,
    Consumer,
    Custom,
    Histogram,
    Largest,
    Norm,
    Reduction,
    Sum,
    merge,
)
from distmm.worker.tasks.rows import WORKSPACE
from distmm.worker.tasks.tall_qr import block_qr, rows_times
from distmm.worker.tasks.threshold import Threshold
from distmm.worker.tasks.warm_up import small_block, touch, warm

__all__ = [
    "METRICS",
    "PAUSE_FRACTION",
    "WORKER_BYTES",
    "WORKSPACE",
    "Arrivals",
    "BlockReduction",
    "Consumer",
    "Custom",
    "Epilogue",
    "Histogram",
    "KernelChoice",
    "Largest",
    "Load",
    "Metric",
    "Norm",
    "Reduction",
    "Sum",
    "Threshold",
    "arrived",
    "arrived_at",
    "block_qr",
    "combine",
    "copy_rate",
    "cores_of",
    "exponents",
    "kernel_facts",
    "load",
    "local_gpu",
    "measure",
    "measure_kernels",
    "merge",
    "mirror",
    "multiply",
    "multiply_and_store",
    "needs_exponents",
    "part",
    "probe",
    "rows_times",
    "small_block",
    "squared_norms",
    "to_device",
    "to_host",
    "topk_of_chunk",
    "touch",
    "warm",
]
