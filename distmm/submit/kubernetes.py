"""Submit a job to Kubernetes and follow it to its end, with ``kubectl`` and the user's own access rights."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from distmm.errors import InputError
from distmm.submit import diagnosis, manifests, tls
from distmm.submit.patience import NoAnswerError, Say, patiently
from distmm.submit.schema import Job, Kubernetes
from distmm.submit.slurm import RESUMABLE, TERMINATED
from distmm.units import seconds

POLL_SECONDS = 3.0


def check_program() -> None:
    """Raise `InputError` on a machine without kubectl."""
    if shutil.which("kubectl") is None:
        raise InputError("there is no kubectl here: install it, or apply the manifests of --dry-run elsewhere")


def submit(job: Job) -> None:
    """Apply a job's manifests to the cluster for which ``kubectl`` is configured.

    Parameters
    ----------
    job : Job

    Raises
    ------
    InputError
        Without kubectl, without the Dask operator or the right to create its resources, and if the cluster refuses a
        manifest.
    """
    check_program()
    policy, daskjob = manifests.job(job)
    certificates = _certificates(job)
    _refuse_missing(job)
    _remove_ended(job)
    where = job.kubernetes.namespace
    _kubectl(where, "apply", "-f", "-", text=manifests.dump([policy, daskjob]))
    owner = _get(where, "daskjob", job.run.name)["metadata"]["uid"]
    # The policy must exist before the first pod. It is applied again with the job as its owner.
    _kubectl(where, "apply", "-f", "-", text=manifests.dump([manifests.owned(policy, job, owner)]))
    if certificates is not None:  # pods wait for the Secret
        contents = {what: Path(path).read_text() for what, path in certificates.items()}
        secret = manifests.owned(manifests.secret(job, contents), job, owner)
        # `apply` would copy the private key into an annotation, which `kubectl describe` shows.
        _kubectl(where, "delete", "secret", secret["metadata"]["name"], "--ignore-not-found")
        _kubectl(where, "create", "-f", "-", text=manifests.dump([secret]))


def secret_command(job: Job) -> str | None:
    """Return the command that creates the Secret of printed manifests; None without TLS.

    Missing temporary certificates are made. They are not printed: a private key does not belong in a file of manifests,
    and ``kubectl apply`` would copy it into an annotation.
    """
    certificates = _certificates(job)
    if certificates is None:
        return None
    files = [f"--from-file={what}.pem={path}" for what, path in certificates.items()]
    where, name = job.kubernetes.namespace, manifests.secret_name(job)
    return shlex.join(["kubectl", "--namespace", where, "create", "secret", "generic", name, *files])


def _certificates(job: Job) -> tls.Certificates | None:
    """Check a job's certificates, and make temporary ones if needed; return their paths, or None without TLS."""
    folder = manifests.certificate_folder(job)
    try:
        return tls.prepared(job.run.tls, folder, job.run.name)
    except OSError as error:
        raise InputError(f"{folder}: {error}; set XDG_DATA_HOME to a folder that you can write, for keys") from error


def _refuse_missing(job: Job) -> None:
    """Refuse a claim or a Secret that does not exist. Without the right to read them, this is not checked."""
    options = job.kubernetes
    for key, kind, name in (("claim", "persistentvolumeclaim", options.claim), ("secret", "secret", options.secret)):
        if not name:
            continue
        try:
            _get(options.namespace, kind, name)
        except InputError as error:
            if "(NotFound)" in str(error):
                raise InputError(
                    f"kubernetes.{key} = {name!r}: namespace {options.namespace} has no such {kind}; create it first, "
                    f"or give another"
                ) from error
            if "(Forbidden)" not in str(error):
                raise


def _remove_ended(job: Job) -> None:
    """Remove the DaskJob of an earlier run with the same name; refuse if it still runs."""
    pods = _get(job.kubernetes.namespace, "pods", "--selector", f"dask.org/cluster-name={job.run.name}")["items"]
    left = _get(job.kubernetes.namespace, "daskjobs", "--field-selector", f"metadata.name={job.run.name}")["items"]
    if left and _ended(_runner(job.run.name, pods)) is None:
        raise InputError(
            f"daskjob {job.run.name} exists already, and has not ended: give another run.name, or end it with "
            f"kubectl -n {job.kubernetes.namespace} delete daskjob {job.run.name}"
        )
    if left:
        _kubectl(job.kubernetes.namespace, "delete", "daskjob", job.run.name)


def _runner(name: str, pods: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the client's pod; empty if it does not exist."""
    return next((pod for pod in pods if pod["metadata"]["name"] == f"{name}-runner"), {})


def follow(job: str, say: Say, start_timeout: str = Kubernetes().start_timeout) -> int:
    """Report the states and the log of a job until it ends.

    Parameters
    ----------
    job : str
        ``NAMESPACE/NAME``; without a namespace, ``default`` is used.
    say : callable
        Called with each line.
    start_timeout : str
        ``kubernetes.start_timeout`` of the job file.

    Returns
    -------
    int
        Exit code of the job's client.

    Raises
    ------
    InputError
        If the cluster does not answer for ten minutes, and for a job that can never start. Such a job is deleted, so
        that its running pods do not hold GPUs while they wait for others.
    """
    namespace, _, name = job.rpartition("/")
    namespace = namespace or Kubernetes().namespace
    started, before = time.monotonic(), ""
    shown, again = 0, f"distmm submit --follow {namespace}/{name}"
    get = partial(patiently, "the cluster", again, say, POLL_SECONDS, _get, namespace)
    while True:
        found = get("daskjob", name)
        pods = get("pods", "--selector", f"dask.org/cluster-name={name}")["items"]
        runner = _runner(name, pods)
        if (current := diagnosis.summary(found, pods)) != before:
            say(f"daskjob {name}: {current}")
            before = current
        if "phase" in runner.get("status", {}) and runner["status"]["phase"] != "Pending":
            lines = _kubectl(namespace, "logs", f"{name}-runner", check=False).splitlines()
            for line in lines[shown:]:
                say(line)
            shown = max(shown, len(lines))  # there are no lines if the cluster does not answer
        # Use the pod's state: the operator's may stay Running (dask-kubernetes issue 975).
        if (code := _ended(runner)) is not None:
            return code
        events = get("events")["items"]
        if reason := diagnosis.hopeless(found, pods, events, time.monotonic() - started, seconds(start_timeout)):
            _kubectl(namespace, "delete", "daskjob", name, "--wait=false")
            raise InputError(f"daskjob {name} can never start and was deleted: {reason}")
        time.sleep(POLL_SECONDS)


def _ended(runner: dict[str, Any]) -> int | None:
    """Return the exit code of the client's pod; None while it runs."""
    status = runner.get("status", {})
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    ends = [state["state"]["terminated"]["exitCode"] for state in status.get("containerStatuses", [])]
    # A pod whose node was removed has no exit code. Its finished blocks are kept.
    code = int(ends[0]) if ends else RESUMABLE
    return RESUMABLE if code == TERMINATED else code


def _get(namespace: str, *what: str) -> dict[str, Any]:
    return json.loads(_kubectl(namespace, "get", *what, "-o", "json"))


def _kubectl(namespace: str, *words: str, text: str | None = None, check: bool = True) -> str:
    command = ["kubectl", "--namespace", namespace, *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode:
        message = done.stderr.strip().rpartition("\n")[2]  # earlier lines repeat the last one
        if "no matches for kind" in message and "Dask" in message:
            message += "; the Dask operator is not installed: see deploy/kubernetes/README.md"
        permanent = re.search(r"\((NotFound|Forbidden|Unauthorized|Invalid|BadRequest)\)|no matches for kind", message)
        raise (InputError if permanent else NoAnswerError)(f"kubectl {words[0]}: {message}")
    return done.stdout
