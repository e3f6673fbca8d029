"""A job as a batch script for Slurm: one allocation, in which srun starts scheduler, workers and client."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from dask.utils import parse_bytes

from distmm import tls
from distmm.submit import dashboard_access
from distmm.submit.schema import Job
from distmm.worker import gpu_worker_setup

__all__ = ["render"]

# Slurm sends the signal up to a minute early (sbatch --signal), and never late.
SCRIPT = """\
#!/bin/bash
{directives}

# One allocation, in which srun starts the scheduler, the workers and the client. Before the walltime (or a preemption)
# Slurm sends USR1 to this script alone. The script stops the client, which keeps all finished blocks and exits with 75,
# and the job requeues itself until C is complete. scancel ends the job for good and keeps all finished blocks: submit
# it again to go on.
set -uo pipefail
umask 077
python={python}
folder={folder}
run=$folder/{name}-$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
scheduler_file=$run.scheduler.json

# Work stealing ignores placement. Dask counts a dead worker as a failure of each of its tasks, and allows 3.
export DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING=False
export DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=100
export DASK_LOGGING__DISTRIBUTED=warning
export OMP_NUM_THREADS={threads} OPENBLAS_NUM_THREADS={threads} MKL_NUM_THREADS={threads} NUMBA_NUM_THREADS={threads}
{exports}
# UCX if there are GPUs and its Python package, else TCP; the InfiniBand interface if there is one.
fabric=$("$python" -m distmm.submit.fabric {fabric}) || exit 2
read -r protocol interface <<<"$fabric"
network=(--protocol "$protocol" ${{interface:+--interface "$interface"}})

# Scheduler and client run beside the workers of the first node (--overlap); only the workers' step takes {resource}.
one=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --cpus-per-task=1{no_gpus})

"${{one[@]}}" --job-name=scheduler "$python" -m dask scheduler --port 0 --scheduler-file "$scheduler_file" \\
    "${{network[@]}}" {dashboard} &
scheduler=$!

# {shape}
srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}{gpus} --job-name=workers \\
    bash -c 'exec "$@" --name "$SLURMD_NODENAME"' worker \\
    "$python" -m dask {worker} --scheduler-file "$scheduler_file" "${{network[@]}}" \\
    --nthreads {worker_threads} --memory-limit {memory} {dashboard} \\
    {worker_options} &
workers=$!

# Waits for {count} worker(s), prints how to reach the dashboard, and then runs the product.
"${{one[@]}}" --job-name=client "$python" -m distmm.submit.ready "$scheduler_file" {count} {patience} -- \\
    {command} --cluster "$scheduler_file"{overwrite} &
client=$!

warned=
trap 'warned=yes; echo "distmm: the allocation ends soon; stopping"' USR1
alive() {{ kill -0 "$1" 2>/dev/null; }}
# TERM goes to the step itself: srun would kill what it started.
stop_client() {{
    step=$(squeue --noheader --steps --jobs "$SLURM_JOB_ID" --format "%j %i" | awk '$1 == "client" {{print $2}}')
    [ -n "$step" ] || return
    scancel --signal=TERM "$step" 2>/dev/null    # fails even if it has signalled; a second TERM would kill
    stopped=yes
}}

# Waits until the first of them ends: without scheduler or workers the client would wait for ever.
stopped=
while alive "$client" && alive "$workers" && alive "$scheduler"; do
    if [ -n "$warned" ] && [ -z "$stopped" ]; then
        stop_client
    fi
    sleep 1 & wait $!    # in the background, so that a signal interrupts the wait
done
lost=
if alive "$client"; then
    lost=$(alive "$workers" && echo scheduler || echo workers)
    echo "distmm: the $lost ended before the product; why is said above"
fi
scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null    # all remaining steps, if any
wait "$client"
code=$?
[ -z "$lost" ] || code={resumable}
wait "$workers" "$scheduler"
rm -f "$scheduler_file"

# A job that is preempted with a grace time gets TERM in all steps. If it ended by itself, it would not be requeued.
preempted() {{
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    [[ $state == *PreemptTime=[0-9]* && $state != *JobState=CANCELLED* ]]
}}
if {{ [ -n "$warned" ] || preempted; }} && [ "$code" -eq {resumable} ] &&
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "distmm: requeued, to go on with what is missing"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

# From the start of the steps until all workers are there. Importing CUDA libraries from a shared folder on many nodes
# at once takes minutes; a node that needs longer than this is broken.
PATIENCE_SECONDS = 600

# Exit code of a job that was stopped, or has lost its scheduler or workers, with all finished work kept (EX_TEMPFAIL of
# sysexits.h).
RESUMABLE = 75


def render(job: Job, *, python: str = sys.executable) -> str:
    """Write the batch script of a job.

    Parameters
    ----------
    job : Job
    python : str
        Interpreter that all nodes can start, with distmm; by default the one that runs now.

    Returns
    -------
    str
        Text for ``sbatch``. Every value that comes from the job file is quoted.
    """
    workers, gpu = job.workers, job.workers.device == "gpu"
    certificates = tls.certificate_paths(job.run.tls, job.run.folder, job.run.name)
    address = {"localhost": "127.0.0.1:0", "all": ":0", "none": "127.0.0.1:0"}[job.run.dashboard]
    no_pages = "--no-dashboard " if job.run.dashboard == "none" else ""
    variables = {**dashboard_access.environment(job.run.dashboard), **tls.environment(certificates)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return SCRIPT.format(
        directives="\n".join(_directives(job)),
        python=shlex.quote(python),
        folder=shlex.quote(job.run.folder),
        name=job.run.name,
        threads=max(1, workers.cpus // workers.per_node),
        exports="".join(f"{line}\n" for line in exports),
        fabric=shlex.join(_fabric(job)),
        resource="the GPUs" if gpu else "the cores",
        no_gpus=" --gres=none" if gpu else "",
        dashboard=f"{no_pages}--dashboard-address {address}",
        shape=_shape(job),
        nodes=workers.nodes,
        cpus=workers.cpus,
        gpus=f" --gres={_gres(job)}" if gpu else "",
        worker="cuda worker" if gpu else "worker",
        worker_threads=workers.threads,
        memory=workers.memory_each,
        worker_options=(shlex.join(gpu_worker_setup.worker_options()) if gpu else f"--nworkers {workers.per_node}"),
        count=workers.count,
        patience=PATIENCE_SECONDS,
        command=_command(job),
        # Only the first start begins anew; a restart resumes.
        overwrite=' $([ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || echo --overwrite)' if job.product.overwrite else "",
        resumable=RESUMABLE,
        restarts=job.run.restarts,
    )


def _command(job: Job) -> str:
    """Write the client's command, its options on a line of their own."""
    verb, a, b, *rest = job.command()
    return f'"$python" -m distmm {shlex.join([verb, a, b, *rest[:2]])} \\\n    {shlex.join(rest[2:])}'


def _gres(job: Job) -> str:
    return job.slurm.gres or f"gpu:{job.workers.per_node}"


def _shape(job: Job) -> str:
    each = f"{job.workers.memory_each / 1e9:.3g} GB of host memory each"
    if job.workers.device == "gpu":
        return f"One process a node, which starts one worker for each of its GPUs; {each}."
    return f"{job.workers.per_node} worker(s) a node with one thread, whose kernels use the other cores; {each}."


def _fabric(job: Job) -> list[str]:
    words = [job.workers.device, "tls" if job.run.tls != "none" else job.workers.transport]
    return [*words, job.workers.interface] if job.workers.interface else words


def _directives(job: Job) -> Iterator[str]:
    """Write the ``#SBATCH`` lines."""
    run, workers, slurm = job.run, job.workers, job.slurm
    minutes = -(-job.seconds("walltime") // 60)
    options = {
        "job-name": run.name,
        "nodes": workers.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": workers.cpus,
        "mem": f"{parse_bytes(workers.memory) // 2**20}M",
        "gres": _gres(job) if workers.device == "gpu" else slurm.gres,
        "time": minutes,
        "signal": f"B:USR1@{job.seconds('grace')}",
        "open-mode": "append",
        "output": f"{run.folder.replace('%', '%%')}/{run.name}-%j.log",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
    }
    yield from (f"#SBATCH --{name}={_quoted(value)}" for name, value in options.items() if value != "")
    yield "#SBATCH --requeue"
    if slurm.exclusive:
        yield "#SBATCH --exclusive"


def _quoted(value: object) -> str:
    """Quote for sbatch, which splits its lines at spaces and knows double quotes."""
    text = str(value)
    return text if text.isascii() and all(c.isalnum() or c in "_.,:+=@%/*&|()[]-" for c in text) else f'"{text}"'
