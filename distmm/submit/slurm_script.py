"""The batch script of a job for Slurm: one allocation, in which srun starts scheduler, workers and client."""

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

# The text of the batch script. Slurm sends USR1 up to a minute early (sbatch --signal), and never late.
SCRIPT = """\
#!/bin/bash
{directives}

# One allocation, in which srun starts the scheduler, the workers and the client. Before the walltime (or a preemption)
# Slurm sends USR1 to this script alone. The script then stops the client, which keeps all finished blocks and exits
# with 75, and the job requeues itself until C is complete. scancel ends the job without a requeue and keeps all
# finished blocks: submit it again to resume it.
exec 2>&1    # only Slurm writes to the error file, for instance when it ends a step, which is no error here
set -uo pipefail
python={python}
folder={folder}
run=$folder/{name}-$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
scheduler_file=$run.scheduler.json
ended=$folder/{name}-$SLURM_JOB_ID.exit
of_slurm=$folder/{name}-$SLURM_JOB_ID.slurm
rm -f "$ended"

# Work stealing ignores placement. Dask counts a dead worker as a failure of each of its tasks, and by default allows 3.
export DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING=False
export DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=100
export DASK_LOGGING__DISTRIBUTED=warning
export OMP_NUM_THREADS={threads} OPENBLAS_NUM_THREADS={threads} MKL_NUM_THREADS={threads} NUMBA_NUM_THREADS={threads}
{exports}
# UCX for GPUs if its Python package is installed, else TCP; the InfiniBand interface if there is one.
fabric=$("$python" -m distmm.submit.fabric {fabric}) || exit 2
read -r protocol interface <<<"$fabric"
network=(--protocol "$protocol" ${{interface:+--interface "$interface"}})

# Scheduler and client share the first node with its workers (--overlap); only the workers' step takes {resource}.
one=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --cpus-per-task=1{no_gpus})

# Runs the workers of a node. A process that dies is restarted up to three times, else its node would be idle. USR1 ends
# the workers, because Slurm logs an error when a step gets TERM.
keep='exec 2>&1
ending=
trap ending=yes INT TERM
trap "ending=yes; kill -TERM \\$process 2>/dev/null" USR1
for start in 1 2 3 4; do
    (trap "" USR1; exec "$@" --name "$SLURMD_NODENAME") & process=$!
    while kill -0 $process 2>/dev/null; do wait $process; code=$?; done
    [ -z "$ending" ] && [ "$code" -ne 0 ] || exit 0
    echo "distmm: the workers of $SLURMD_NODENAME have ended with code $code"
    sleep 3
done
exit "$code"'
# Runs a command on this node and writes its process number, for signals from this script, and its exit code to files.
# The step itself exits with 0, because srun logs an error for other codes.
known='trap "" USR1; "$@" 2>&1 & echo $! >"$0.pid"; trap : INT TERM
while kill -0 $! 2>/dev/null; do wait $!; code=$?; done; echo "$code" >"$0.code"'

"${{one[@]}}" --job-name=scheduler bash -c "$known" "$run.scheduler" \\
    "$python" -m dask scheduler --port 0 --scheduler-file "$scheduler_file" "${{network[@]}}" {dashboard} \\
    2>>"$of_slurm" &
scheduler=$!

# {shape}
srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}{gpus} --job-name=workers \\
    bash -c "$keep" worker \\
    "$python" -m dask {worker} --scheduler-file "$scheduler_file" "${{network[@]}}" \\
    --nthreads {worker_threads} --memory-limit {memory} {worker_pages} \\
    {worker_options} 2>>"$of_slurm" &
workers=$!

# Waits for {count} worker(s), prints how to open the dashboard, and then runs the product.
"${{one[@]}}" --job-name=client bash -c "$known" "$run.client" \\
    "$python" -m distmm.submit.ready "$scheduler_file" {count} {patience} -- \\
    {command} --deadline {deadline}s --cluster "$scheduler_file"{overwrite} \\
    2>>"$of_slurm" &
client=$!

warned=
trap 'warned=yes; echo "distmm: the allocation ends soon; stopping"' USR1
alive() {{ kill -0 "$1" 2>/dev/null; }}
# The client runs on this node. TERM is sent to the client and not to srun, which would kill it.
stop_client() {{
    [ -s "$run.client.pid" ] && kill -TERM "$(<"$run.client.pid")" && stopped=yes
}}

# Waits until client, workers or scheduler end: without scheduler or workers the client would wait without end.
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
    echo "distmm: the $lost ended before the product; the reason is above"
fi
[ -z "$lost" ] || stop_client
scancel --signal=USR1 "$SLURM_JOB_ID" 2>/dev/null    # ends the workers, the remaining steps
wait "$client"
code=$(cat "$run.client.code" 2>/dev/null || echo {killed})
[ -z "$lost" ] && [ "$code" -ne {terminated} ] || code={resumable}
[ "$SECONDS" -lt {deadline} ] || warned=yes    # the client's deadline counts if Slurm's limit was changed
wait "$workers"
[ ! -s "$run.scheduler.pid" ] || kill -TERM "$(<"$run.scheduler.pid")" 2>/dev/null
wait "$scheduler"
rm -f "$scheduler_file" "$run".{{scheduler,client}}.{{pid,code}}
[[ $code$lost == 0 || $code$lost == {resumable} ]] || cat "$of_slurm"

# In a preemption with a grace time all steps get TERM. Slurm does not requeue a job that then ends by itself, so this
# script requeues it.
preempted() {{
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    [[ $state == *PreemptTime=[0-9]* && $state != *JobState=CANCELLED* ]]
}}
if [ "$code" -eq {resumable} ] && {{ [ -n "$warned" ] || preempted; }}; then
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
        echo "distmm: requeued, to compute the missing blocks"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    fi
    echo "distmm: not requeued: run.restarts is {restarts}; submit it again to resume it"
fi
echo "$code" >"$ended"    # Slurm forgets a job some minutes after its end
exit "$code"
"""

# Seconds from the start of the steps until all workers must have joined. Many nodes that import CUDA libraries from a
# shared folder at once need minutes; a node that needs longer than this is broken.
PATIENCE_SECONDS = 600

# Exit code of a job that was stopped, or lost its scheduler or workers, and can be resumed (EX_TEMPFAIL of sysexits.h).
RESUMABLE = 75

# Exit code of a client that SIGTERM ended before its product started, for instance during its imports. No work is lost,
# so the job counts as stopped.
TERMINATED = 143

# Exit code of a job whose client was killed: 128 + SIGKILL, as in shells.
KILLED = 137


def render(job: Job, *, python: str = sys.executable) -> str:
    """Return the batch script of a job.

    Parameters
    ----------
    job : Job
    python : str
        Interpreter with distmm that all nodes can start; by default the present one.

    Returns
    -------
    str
        Text for ``sbatch``. Every value from the job file is quoted.
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
        # The workers' web servers always listen on all interfaces, for Prometheus; only their pages can be off.
        worker_pages=f"{'' if job.run.dashboard == 'all' else '--no-dashboard '}--dashboard-address :0",
        deadline=60 * _minutes(job) - job.seconds("grace"),
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
        # Only the first start discards finished blocks; a restart resumes.
        overwrite=' $([ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || echo --overwrite)' if job.product.overwrite else "",
        resumable=RESUMABLE,
        killed=KILLED,
        terminated=TERMINATED,
        restarts=job.run.restarts,
    )


def _command(job: Job) -> str:
    """Return the client's command, with its options on a second line."""
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
    """Yield the ``#SBATCH`` lines."""
    run, workers, slurm = job.run, job.workers, job.slurm
    folder = run.folder.replace("%", "%%")
    options = {
        "job-name": run.name,
        "nodes": workers.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": workers.cpus,
        "mem": f"{parse_bytes(workers.memory) // 2**20}M",
        "gres": _gres(job) if workers.device == "gpu" else slurm.gres,
        "time": _minutes(job),
        "signal": f"B:USR1@{job.seconds('grace')}",
        "open-mode": "append",
        "output": f"{folder}/{run.name}-%j.log",
        "error": f"{folder}/{run.name}-%j.slurm",
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


def _minutes(job: Job) -> int:
    """Return the walltime in minutes, rounded up, which is Slurm's unit."""
    return -(-job.seconds("walltime") // 60)


def _quoted(value: object) -> str:
    """Quote a value for sbatch, which splits lines at spaces and supports double quotes."""
    text = str(value)
    return text if text.isascii() and all(c.isalnum() or c in "_.,:+=@%/*&|()[]-" for c in text) else f'"{text}"'
