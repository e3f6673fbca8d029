"""What Kubernetes says of a job that does not start, and whether waiting can help."""

from __future__ import annotations

from typing import Any

import pytest

from distmm.submit import diagnosis

JOB = {
    "metadata": {"name": "product", "creationTimestamp": "2026-11-22T10:00:00Z"},
    "status": {"jobStatus": "ClusterCreated"},
}


def pod(name: str = "product-default-worker-1", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": "Pending", **status}}


def waiting(reason: str, restarts: int = 0, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    last = {"terminated": {"exitCode": 2, "reason": "Error"}}
    return pod(containerStatuses=[{"state": state, "restartCount": restarts, "lastState": last}])


def unscheduled(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def event(reason: str, message: str = "", about: str = "product-default-worker-1", time: str = "2026-11-22T10:00:30Z"):
    return {"reason": reason, "message": message, "involvedObject": {"name": about}, "lastTimestamp": time}


GATED = pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}])
QUEUED = {"name": "product-default-worker-1", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
NO_GPUS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
QUOTA = 'pods "product-runner" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: 8'


@pytest.mark.parametrize(
    ("pods", "events", "waited", "said"),
    [
        ([waiting("ImagePullBackOff", message="Back-off pulling image x")], [], 5, "cannot be pulled.*pulling image x"),
        ([waiting("CreateContainerConfigError", message='secret "s3" not found')], [], 5, 'secret "s3" not found'),
        ([waiting("CrashLoopBackOff", restarts=3)], [], 5, "ended 3 times, the last time with code 2"),
        ([unscheduled('persistentvolumeclaim "matrices" not found')], [], 5, "create the claim first"),
        ([unscheduled(NO_GPUS)], [event("NotTriggerScaleUp", "max node group size")], 5, "none will be added"),
        ([unscheduled(NO_GPUS)], [], 601, "no node could run it for 601 s .*3 Insufficient nvidia.com/gpu"),
        ([], [event("FailedCreate", QUOTA, about="product-default")], 5, "exceeded quota: gpus"),
    ],
)  # fmt: skip
def test_a_job_that_can_never_start_is_seen(pods: list[Any], events: list[Any], waited: float, said: str) -> None:
    import re

    reason = diagnosis.hopeless(JOB, pods, events, waited, 600)
    assert reason is not None
    assert re.search(said, reason)


@pytest.mark.parametrize(
    ("pods", "events", "waited"),
    [
        ([], [], 5),
        ([pod("product-runner", phase="Running")], [], 5000),
        ([waiting("ContainerCreating")], [], 100),
        ([waiting("ErrImagePull")], [], 5),  # a registry that is down for a moment
        ([waiting("CrashLoopBackOff", restarts=1)], [], 5),
        ([unscheduled(NO_GPUS)], [], 599),  # another job may end
        ([unscheduled(NO_GPUS)], [event("TriggeredScaleUp")], 5000),  # nodes are on their way
        ([GATED], [], 50_000),  # its queue has not admitted it
        ([waiting("CrashLoopBackOff", restarts=9), GATED], [], 50_000),  # nor its scheduler, which workers seek in vain
        ([{**unscheduled(NO_GPUS), "metadata": QUEUED}], [], 50_000),  # its queue has, a moment ago
        ([unscheduled(NO_GPUS)], [event("NotTriggerScaleUp", time="2026-11-22T09:59:00Z")], 5),  # of an earlier job
        ([], [event("FailedCreate", QUOTA, about="productive-runner")], 5),  # of another job
    ],
)
def test_a_job_that_may_yet_start_is_waited_for(pods: list[Any], events: list[Any], waited: float) -> None:
    assert diagnosis.hopeless(JOB, pods, events, waited, 600) is None


def test_a_missing_operator_is_seen_after_a_minute() -> None:
    untouched = {"metadata": JOB["metadata"]}
    assert diagnosis.hopeless(untouched, [], [], 30, 600) is None
    assert "the Dask operator is not running" in (diagnosis.hopeless(untouched, [], [], 61, 600) or "")


def test_a_summary_counts_pods_by_phase() -> None:
    pods = [pod("a", phase="Running"), pod("b"), pod("c")]
    assert diagnosis.summary(JOB, pods) == "ClusterCreated; pods: 2 pending, 1 running"
