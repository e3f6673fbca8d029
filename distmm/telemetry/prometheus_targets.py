"""``/distmm-targets.json``: the workers' addresses for Prometheus' HTTP discovery, since workers choose their ports."""

from __future__ import annotations

import json
from typing import Any

from distributed.http.utils import RequestHandler
from distributed.scheduler import Scheduler

from distmm.telemetry import dashboard_server

PATH = "/distmm-targets.json"


def targets(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return the addresses of the workers' ``/metrics``, in the JSON form of Prometheus' HTTP discovery."""
    found = (scheduler.get_worker_service_addr(address, "dashboard") for address in scheduler.workers)
    return [{"targets": sorted(f"{host}:{port}" for host, port in filter(None, found)), "labels": {}}]


class _Targets(RequestHandler):
    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps(targets(self.server)))


def install(scheduler: Scheduler) -> None:
    """Serve ``/distmm-targets.json``; does nothing on a scheduler without a web server."""
    dashboard_server.add_handler(scheduler, PATH, _Targets)
