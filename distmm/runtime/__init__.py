"""Running plans: the serial executor that defines what a plan means, and the plugins and calls for a Dask cluster."""
