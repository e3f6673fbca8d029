"""From a plan to a Dask graph, and the serial executor that defines what a plan means."""
