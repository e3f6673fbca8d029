"""The public names of `distmm` are imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distmm


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
