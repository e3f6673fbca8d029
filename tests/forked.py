"""Workers for the tests, forked from a process that has imported what they need: tenths of a second instead of seconds.

For clusters that are no test of how a cluster starts. Clusters of `distmm.clusters` and commands start theirs anew.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

import dask
import pytest
from distributed.utils import get_mp_context

SELDOM = {
    "distributed.worker.memory.monitor-interval": "1s",
    "distributed.admin.tick.interval": "10s",
    "distributed.worker.profile.interval": "10s",
    "distributed.worker.profile.cycle": "60s",
    "distributed.deploy.cluster-repr-interval": "60s",
}
IMPORTED = ["distributed", "distmm.job", "distmm_kernels.gemm.cpu", "distmm.telemetry.worker", "s3fs"]


@contextmanager
def workers() -> Iterator[None]:
    """Have the clusters that are started meanwhile fork their workers.

    They look after themselves more rarely than those of `distmm.clusters`: by Dask's own intervals a cluster of four
    workers takes 17 % of a core while it is idle, by those of `distmm.clusters` 8 %, and by these 5 %.
    """
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver", **SELDOM}):
        get_mp_context()  # which has the server import less
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            # NumPy reads the number of its threads when it is imported.
            for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
                patch.setenv(name, str(value))
            forkserver.ensure_running()
        yield
