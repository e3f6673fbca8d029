"""The public names of `distmm` are imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distmm

# Packages whose imports take most of the time to the first result of a new process.
HEAVY = {"bokeh", "dask.array", "distributed", "numba", "pandas", "scipy", "xarray", "zarr"}


def test_all_names_lead_to_objects_of_distmm() -> None:
    assert set(distmm.__all__) <= set(dir(distmm))
    assert [name for name in distmm.__all__ if not getattr(distmm, name).__module__.startswith("distmm.")] == []
    with pytest.raises(AttributeError, match="module 'distmm' has no attribute 'nothing'"):
        distmm.nothing  # noqa: B018


def test_a_bare_import_and_status_load_no_dask_and_a_public_package_is_an_attribute() -> None:
    code = (
        "import sys, distmm; assert not {'dask', 'numpy'} & {*sys.modules}; "
        "distmm.status; assert not {'dask', 'distributed', 'fsspec', 'h5py', 'numpy', 'zarr'} & {*sys.modules}; "
        "distmm.clusters.local; distmm.matmul; "
        "import dask; assert dask.config.get('distmm.precision') == 'highest'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defaults_are_in_a_configuration_of_dask_that_is_there() -> None:
    code = "import dask.config, distmm; assert dask.config.get('distmm.precision') == 'highest'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_product_of_arrays_of_this_process_loads_what_multiplies_and_no_cluster() -> None:
    code = (
        "import sys, numpy, distmm; a = numpy.ones((8, 8)); distmm.matmul(a, a, out=numpy.empty_like(a)); "
        "distmm.gemm(2, a, a, 1, a, out=numpy.empty_like(a)); distmm.gram(a, out=numpy.empty_like(a)); "
        f"found = {HEAVY} & {{*sys.modules}}; assert not found, found; "
        "assert distmm.matmul(a, a).compute()[0, 0] == 8; assert 'distributed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_load_the_modules_of_their_tasks_without_dasks_arrays() -> None:
    code = (
        "import sys, distributed, distmm.clusters.view, distmm.telemetry.worker, distmm.worker.plugin; "
        "import distmm.worker.tasks.products, distmm.worker.tasks.warm_up; "
        f"found = {HEAVY} - {{'distributed'}} & {{*sys.modules}}; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
