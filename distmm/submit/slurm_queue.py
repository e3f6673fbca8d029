"""States of jobs in Slurm's queue, and the reasons for which a job can never start."""

from __future__ import annotations

import re

__all__ = ["ANSWER_SECONDS", "ENDED", "NEVER", "POLL_SECONDS"]

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
