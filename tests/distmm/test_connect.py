"""What a failed connection leaves behind; in a module of its own, without clients of other tests."""

from __future__ import annotations

import pytest
from distributed import default_client

from distmm import clusters
from distmm.errors import InputError
from distmm.runtime.cluster import current_client


def test_a_cluster_that_cannot_be_reached_leaves_no_client_behind() -> None:
    failed = []
    for address in ("carrier://pigeon:1", "tcp://127.0.0.1:1"):
        with pytest.raises(InputError) as error, clusters.connect(address, timeout=0.3):
            pass
        failed.append(error)  # keeps the traceback, and with it the client that failed, alive
        assert current_client() is None
        with pytest.raises(ValueError, match="No clients found"):
            default_client()
