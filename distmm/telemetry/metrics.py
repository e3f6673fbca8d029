"""Prometheus series, on the ``/metrics`` of scheduler and workers.

Either the scheduler or the workers serve a series, never both, so sums over all targets are right. The scheduler serves
the series of products (operations, kernel seconds, blocks, failures). Each worker serves its own series (bytes received
and held, its GPU). All figures come from the records and the workers' plugins; this module counts nothing.
``/distmm-targets.json`` has the workers' addresses for Prometheus' HTTP discovery, since workers choose their ports.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from distributed.http.utils import RequestHandler
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from distmm.telemetry.figures import UNDER_WAY
from distmm.telemetry.record import Record

# Kind, labels and meaning of every series, by name. prometheus_client adds the suffix _total to counters.
SERIES: dict[str, tuple[Literal["counter", "gauge"], str, str]] = {
    # on the scheduler
    "distmm_flops": ("counter", "worker", "Operations of product tasks that finished, repeated ones included."),
    "distmm_steps": ("counter", "worker", "Product tasks that finished, repeated ones included."),
    "distmm_kernel_seconds": ("counter", "worker", "Time with a product task running on the worker."),
    "distmm_silences": ("counter", "worker", "Times that the worker sent no heartbeat for long while a product ran."),
    "distmm_silent_seconds": ("gauge", "worker", "Time since the last heartbeat of a silent worker; 0 of others."),
    "distmm_products": ("counter", "", "Products that were started; a job is one."),
    "distmm_failures": ("counter", "", "Tasks that failed after all retries: loads, steps, checks and writes."),
    "distmm_interruptions": ("counter", "", "Runs of product tasks that ended without a result and were repeated."),
    "distmm_recomputations": ("counter", "", "Results of product tasks that were lost and computed again."),
    "distmm_resumes": ("counter", "", "Products that went on from blocks on disk."),
    "distmm_rejections": ("counter", "", "Blocks of C that failed their check."),
    "distmm_product_info": ("gauge", "product,verb", "1 for each product, with what is done with C, such as topk."),
    "distmm_blocks": ("gauge", "product", "Blocks of C."),
    "distmm_blocks_done": ("gauge", "product", "Blocks of C that are done."),
    "distmm_progress_ratio": ("gauge", "product", "Fraction of the steps that are done."),
    "distmm_left_seconds": ("gauge", "product", "Time left; absent before the first step, infinite while stalled."),
    "distmm_moved_bytes": ("gauge", "product", "Bytes that workers received from one another for the product."),
    "distmm_bound_bytes": ("gauge", "product", "Bytes of A and B that a 2-D product has to move."),
    "distmm_workers": ("gauge", "product", "Workers of the product that are heard of; 0 when it is over."),
    "distmm_workers_planned": ("gauge", "product", "Workers of the product's plan."),
    "distmm_idle_seconds": ("gauge", "product", "Time since the last step, check or write; 0 when it is over."),
    "distmm_stalled": ("gauge", "product", "1 while the product is stalled: no step for long, or no workers."),
    "distmm_running": ("gauge", "product", "1 while the product is neither complete nor given up."),
    "distmm_planned_flops_per_second": ("gauge", "", "Rate of one worker's kernel in the plan of the last product."),
    "distmm_planned_peak_bytes": ("gauge", "", "Peak of one worker's blocks: the last plan's, and blocks of others."),
    # on the workers
    "distmm_received_bytes": ("counter", "worker", "Bytes of blocks received from other workers."),
    "distmm_block_bytes": ("gauge", "worker", "Bytes of the blocks that the worker holds."),
    "distmm_gpu_memory_used_bytes": ("gauge", "worker", "Bytes in use on the worker's GPU."),
    "distmm_gpu_memory_bytes": ("gauge", "worker", "Memory of the worker's GPU."),
    "distmm_gpu_utilization_ratio": ("gauge", "worker", "Fraction of time with a kernel running on the worker's GPU."),
}

Reading = tuple[str, str, float]  # name of the series, values of its labels joined by LABEL_END, value

LABEL_END = "\0"


def counts(record: Record) -> Counter[str]:
    """Return the counters of a record, by series and label (``"distmm_flops/worker-0"``)."""
    found: Counter[str] = Counter(
        distmm_products=1,
        distmm_failures=record.failed,
        distmm_interruptions=record.interrupted,
        distmm_recomputations=int(record.again.sum()),
        distmm_rejections=record.refutations,
    )
    for name, lane in record.lanes.items():
        found[f"distmm_flops/{name}"] += int(lane.flops)
        found[f"distmm_steps/{name}"] += lane.steps
        found[f"distmm_kernel_seconds/{name}"] += lane.seconds["multiply"]  # type: ignore[assignment]  # no integer
    return found


def of_records(records: Sequence[Record], past: Counter[str]) -> Iterator[Reading]:
    """Return the series of the products on one scheduler; `past` has the counters of records that were dropped."""
    # Counters exist at 0 from the start: Prometheus sees no increase in a series that begins at 1.
    totals = Counter({name: 0 for name, (kind, label, _) in SERIES.items() if kind == "counter" and not label})
    totals.update(past)
    for record in records:
        totals.update(counts(record))
    for key, count in totals.items():
        series, _, worker = key.partition("/")
        yield series, worker, count
    now = time.time()
    for record in records:
        f = record.figures(now)
        under_way = f.state in UNDER_WAY
        yield "distmm_product_info", f"{record.title}{LABEL_END}{f.verb}", 1
        of_product = {
            "blocks": f.blocks,
            "blocks_done": f.blocks_done,
            "progress_ratio": f.done / max(1, f.total),
            **({"left_seconds": f.left} if f.done else {}),
            "moved_bytes": f.moved,
            "bound_bytes": f.bound,
            "workers": f.workers if under_way else 0,
            "workers_planned": f.planned,
            "idle_seconds": f.idle if under_way else 0.0,
            "stalled": f.state == "stalled",
            "running": under_way,
        }
        for name, value in of_product.items():
            yield f"distmm_{name}", record.title, value
    if records:
        last = records[-1]
        others = max((lane.others for lane in last.lanes.values()), default=0)
        yield "distmm_planned_flops_per_second", "", last.plan.cluster.rate
        yield "distmm_planned_peak_bytes", "", last.plan.peak.worker + others


# The plugins of all schedulers and workers of this process, which share one Prometheus registry. Their `readings` are
# served until they are deleted, or removed here.
SOURCES: weakref.WeakSet[Any] = weakref.WeakSet()


class _Collector:
    """Collects the series of `SOURCES`."""

    def collect(self) -> Iterator[Metric]:
        """Return the present value of all series."""
        readings: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for source in list(SOURCES):
            for name, labels, value in source.readings():
                # The registry accepts a series once only, so the counters of two clusters in one process are added.
                before = readings[name].get(labels, 0) if SERIES[name][0] == "counter" else 0
                readings[name][labels] = before + value
        for name, values in readings.items():
            kind, label, meaning = SERIES[name]
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(name, meaning, labels=label.split(",") if label else [])
            for labels, value in values.items():
                family.add_metric(labels.split(LABEL_END) if label else [], value)
            yield family


REGISTRY.register(_Collector())


PATH = "/distmm-targets.json"


class Targets(RequestHandler):
    """Answers with the addresses of the workers' ``/metrics``, in the JSON form of Prometheus' HTTP discovery."""

    def get(self) -> None:
        """Write them."""
        found = (self.server.get_worker_service_addr(address, "dashboard") for address in self.server.workers)
        targets = sorted(f"{host}:{port}" for host, port in filter(None, found))
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps([{"targets": targets, "labels": {}}]))
