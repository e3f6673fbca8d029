"""From a plan to a Dask graph."""
