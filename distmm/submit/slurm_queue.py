"""States of jobs in Slurm's queue, and the reasons for which a job can never start."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from distmm.errors import InputError

__all__ = ["ANSWER_SECONDS", "ENDED", "NEVER", "POLL_SECONDS", "Entry", "check_answers", "entries", "queued"]

# Seconds between two requests to slurmctld, which serves the whole site.
POLL_SECONDS = 2.0

# Limit for Slurm's commands. They try to reach slurmctld for 10 s (MessageTimeout), and then its backup.
ANSWER_SECONDS = 60.0

# Reasons for which a pending job never starts, even on an idle cluster (squeue, JOB REASON CODES): its request does not
# exist, is not allowed, or exceeds the limit of a single job.
NEVER = re.compile(
    "AccountNotAllowed|BadConstraints|InvalidAccount|InvalidQOS|PartitionConfig|PartitionInactive|PartitionNodeLimit|"
    r"PartitionTimeLimit|QOSNotAllowed|ReservationDeleted|(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+"
)

# States in which a job has ended (squeue, JOB STATE CODES). About twenty other states are temporary.
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip

# The ends that the job's own program causes: another job of the same script would end in the same way.
OWN_FAULT = {"COMPLETED", "FAILED", "OUT_OF_MEMORY"}


class Entry(NamedTuple):
    """A job in the queue, or one that left it a few minutes ago at most (Slurm's MinJobAge)."""

    number: str
    state: str
    reason: str

    @property
    def can_never_start(self) -> bool:
        """Whether the job is pending for a reason that never goes away."""
        return self.state == "PENDING" and NEVER.fullmatch(self.reason) is not None

    @property
    def end(self) -> str:
        """The end that the job's program caused, as in "has ended: FAILED (NonZeroExitCode)"; empty if it did not."""
        return f"has ended: {self.state} ({self.reason})" if self.state in OWN_FAULT else ""


def entries(numbers: Iterable[str]) -> list[Entry]:
    """Return the entries of jobs by their numbers; empty if Slurm does not answer or has forgotten all of them."""
    asked = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", "--format=%A|%T|%r"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [Entry(*line.split("|", 2)) for line in lines if line.count("|") >= 2]


def queued() -> set[str] | None:
    """Return the numbers of this user's pending and running jobs; None if Slurm does not answer."""
    asked = ["squeue", "--me", "--noheader", "--format=%A"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return None if done.returncode else set(done.stdout.split())


def check_answers() -> None:
    """Raise `InputError` if Slurm does not answer."""
    asked = ["sinfo", "--noheader", "--format=%P"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
        said = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        said = f"no answer within {ANSWER_SECONDS:.0f} s"
    if said:
        raise InputError(
            f"Slurm does not work here: {' '.join(asked)} says: {said}; is this a login node of a cluster, and is "
            f"Slurm configured and running? Without it: --cluster local"
        )
