"""Diagnosis of a Kubernetes job that does not start: whether waiting can help, from its pods and events."""

from __future__ import annotations

import re
from typing import Any

from distmm.submit.values import QUEUE_LABEL

Resource = dict[str, Any]

# Reasons of waiting containers that need an action of the user. A short failure of the registry gives ErrImagePull;
# ImagePullBackOff comes only after a second failure.
HOPELESS_WAITING = {
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image has no valid name",
    "CreateContainerConfigError": "its Secret or ConfigMap is missing",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
}

# A worker that starts before its scheduler exits and is restarted once or twice. More restarts have another cause.
MOST_RESTARTS = 3

# After so many seconds without a status of the job, the operator is not running. Normally it takes a few seconds.
OPERATOR_SECONDS = 60.0


def hopeless(job: Resource, pods: list[Resource], events: list[Resource], waited: float, patience: float) -> str | None:
    """Return why a job can never start.

    Parameters
    ----------
    job : dict
        The DaskJob.
    pods : list of dict
        Its pods.
    events : list of dict
        Events of the namespace.
    waited : float
        Seconds since it was submitted.
    patience : float
        Seconds after which a pod that fits no node counts as hopeless, unless the cluster is adding nodes.

    Returns
    -------
    str or None
        Reason and remedy; None if the job may still start.
    """
    if not job.get("status", {}).get("jobStatus"):
        if waited > OPERATOR_SECONDS:
            return (
                f"it has had no status for {waited:.0f} s: the Dask operator is not running; install it with "
                f"helm install --repo https://helm.dask.org --generate-name dask-kubernetes-operator"
            )
        return None
    # Kubernetes keeps events of an earlier job of this name for an hour. Times are ISO 8601 in UTC and compare as text.
    created = job["metadata"].get("creationTimestamp", "")
    events = [event for event in events if (event.get("lastTimestamp") or event.get("eventTime") or "~") >= created]
    held_back = any(_unscheduled_condition(pod).get("reason") == "SchedulingGated" for pod in pods)
    return _creation_problem(job["metadata"]["name"], events) or next(
        (reason for pod in pods if (reason := _pod_problem(pod, events, waited, patience, held_back))), None
    )


def summary(job: Resource, pods: list[Resource]) -> str:
    """Return the state of a job and of its pods in one line."""
    phases = [pod.get("status", {}).get("phase", "Unknown") for pod in pods]
    counts = ", ".join(f"{phases.count(phase)} {phase.lower()}" for phase in sorted(set(phases))) or "none"
    return f"{job.get('status', {}).get('jobStatus') or 'submitted'}; pods: {counts}"


def _creation_problem(name: str, events: list[Resource]) -> str | None:
    """Return why pods of a job could not be created: a quota, or a policy of the namespace."""
    for event in events:
        about, message = event.get("involvedObject", {}).get("name", ""), event.get("message", "")
        ours = re.fullmatch(rf"{re.escape(name)}(-.+)?", about)
        if ours and event.get("reason") == "FailedCreate" and "forbidden" in message:
            return f"its pods are refused: {message}; request less, or ask for a larger quota"
    return None


def _unscheduled_condition(pod: Resource) -> Resource:
    """Return the condition that says why a pod is not scheduled; empty for a pod on a node."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next((one for one in conditions if (one.get("type"), one.get("status")) == ("PodScheduled", "False")), {})


def _pod_problem(pod: Resource, events: list[Resource], waited: float, patience: float, held_back: bool) -> str | None:
    """Return why a pod can never start. With `held_back`, a queue holds back other pods, so restarts are normal."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in HOPELESS_WAITING:
            why = HOPELESS_WAITING[waiting["reason"]]
            return f"pod {name}: {why} ({waiting['reason']}: {waiting.get('message', container.get('image', ''))})"
        restarts = 0 if held_back else container.get("restartCount", 0)
        if waiting.get("reason") == "CrashLoopBackOff" and restarts >= MOST_RESTARTS:
            last = container.get("lastState", {}).get("terminated", {})
            return (
                f"pod {name}: has ended {restarts} times, the last time with code "
                f"{last.get('exitCode')} ({last.get('reason')}); kubectl logs --previous {name} shows why"
            )
    if condition := _unscheduled_condition(pod):
        queued = held_back or QUEUE_LABEL in pod["metadata"].get("labels", {})
        return _scheduling_problem(name, condition.get("message", ""), events, 0 if queued else waited, patience)
    return None


def _scheduling_problem(name: str, message: str, events: list[Resource], waited: float, patience: float) -> str | None:
    """Return why a pod can never be scheduled. New nodes may come, or other jobs may end; a queue has no time limit."""
    if re.search(r'persistentvolumeclaim "[^"]*" not found', message):
        return f"pod {name}: {message}; create the claim first, or set kubernetes.claim to another"
    about = [event for event in events if event.get("involvedObject", {}).get("name") == name]
    reasons = {event.get("reason") for event in about}
    if "TriggeredScaleUp" in reasons:
        return None
    if "NotTriggerScaleUp" in reasons:
        said = next(event.get("message", "") for event in about if event.get("reason") == "NotTriggerScaleUp")
        return f"pod {name}: no node can run it ({message}), and none will be added ({said}); request less for a node"
    if waited > patience:
        return (
            f"pod {name}: no node could run it for {waited:.0f} s ({message}); request less, or wait longer with "
            "kubernetes.start_timeout"
        )
    return None
