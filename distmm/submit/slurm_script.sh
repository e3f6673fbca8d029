{% set run, workers, slurm, gpu, command = job.run, job.workers, job.slurm, job.workers.device == "gpu", job.command() %}
{% set gres = slurm.gres or ("gpu:%d" % workers.per_node if gpu else "") %}
{# The walltime in minutes, rounded up, which is Slurm's unit. #}
{% set grace, minutes = job.seconds("grace"), (job.seconds("walltime") + 59) // 60 %}
{% set deadline = 60 * minutes - grace %}
#!/bin/bash
#SBATCH --job-name={{ run.name }}
#SBATCH --nodes={{ workers.nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={{ workers.cpus }}
#SBATCH --mem={{ megabytes }}M
{% if gres %}
#SBATCH --gres={{ gres }}
{% endif %}
#SBATCH --time={{ minutes }}
#SBATCH --signal=B:USR1@{{ grace }}
#SBATCH --open-mode=append
#SBATCH --output={{ output }}
#SBATCH --error={{ error }}
{% for option in ("partition", "account", "qos", "reservation", "constraint") if slurm[option] %}
#SBATCH --{{ option }}={{ slurm[option] }}
{% endfor %}
#SBATCH --requeue
{% if slurm.exclusive %}
#SBATCH --exclusive
{% endif %}

# One allocation, in which srun starts the scheduler, the workers and the client. Before the walltime (or a preemption)
# Slurm sends USR1 to this script alone. The script then stops the client, which keeps all finished blocks and exits
# with 75, and the job requeues itself until C is complete. scancel ends the job without a requeue and keeps all
# finished blocks: submit it again to resume it.
exec 2>&1    # only Slurm writes to the error file, for instance when it ends a step, which is no error here
set -uo pipefail
python={{ python | quote }}
folder={{ run.folder | quote }}
run=$folder/{{ run.name }}-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
scheduler_file=$run.scheduler.json
ended=$folder/{{ run.name }}-$SLURM_JOB_ID.exit
of_slurm=$folder/{{ run.name }}-$SLURM_JOB_ID.slurm
rm -f "$ended"

# Work stealing ignores placement. Dask counts a dead worker as a failure of each of its tasks, and by default allows 3.
export DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING=False
export DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=100
# The scheduler's warnings about lost workers name all tasks that they had, and a worker that ends while it runs a task
# warns of that task; errors are logged.
export DASK_LOGGING="{'distributed': 'warning', 'distributed.scheduler': 'error', 'distributed.worker.state_machine': 'error'}"
{% set threads = [1, workers.cpus // workers.per_node] | max %}
export OMP_NUM_THREADS={{ threads }} OPENBLAS_NUM_THREADS={{ threads }} MKL_NUM_THREADS={{ threads }} NUMBA_NUM_THREADS={{ threads }}
{% for name, value in variables.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}

# UCX for GPUs if its Python package is installed, else TCP; the InfiniBand interface if there is one.
fabric=$("$python" -m distmm.submit.fabric {{ workers.device }} {{ "tls" if run.tls != "none" else workers.transport }}{{ " " ~ workers.interface if workers.interface }}) || exit 2
read -r protocol interface <<<"$fabric"
network=(--protocol "$protocol" ${interface:+--interface "$interface"})

# Scheduler and client share the first node with its workers (--overlap); only the workers' step takes the {{ "GPUs" if gpu else "cores" }}.
one=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --cpus-per-task=1{{ " --gres=none" if gpu }})

# Runs the workers of a node. A process that dies is restarted up to three times, else its node would be idle. USR1 ends
# the workers, because Slurm logs an error when a step gets TERM.
keep='exec 2>&1
ending=
trap ending=yes INT TERM
trap "ending=yes; kill -TERM \$process 2>/dev/null" USR1
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

"${one[@]}" --job-name=scheduler bash -c "$known" "$run.scheduler" \
    "$python" -m dask scheduler --port 0 --scheduler-file "$scheduler_file" "${network[@]}" {{ "--no-dashboard " if run.dashboard == "none" }}--dashboard-address {{ ":0" if run.dashboard == "all" else "127.0.0.1:0" }} \
    2>>"$of_slurm" &
scheduler=$!

{% set gigabytes = "%.3g" | format(workers.memory_each / 1e9) %}
{% if gpu %}
# One process a node, which starts one worker for each of its GPUs; {{ gigabytes }} GB of host memory each.
{% else %}
# {{ workers.per_node }} worker(s) a node with one thread, whose kernels use the other cores; {{ gigabytes }} GB of host memory each.
{% endif %}
{# The workers' web servers always listen on all interfaces, for Prometheus; only their pages can be off. #}
srun --overlap --nodes={{ workers.nodes }} --ntasks={{ workers.nodes }} --ntasks-per-node=1 --cpus-per-task={{ workers.cpus }}{{ " --gres=" ~ gres if gpu }} --job-name=workers \
    bash -c "$keep" worker \
    "$python" -m dask {{ "cuda worker" if gpu else "worker" }} --scheduler-file "$scheduler_file" "${network[@]}" \
    --nthreads {{ workers.threads }} --memory-limit {{ workers.memory_each }} {{ "--no-dashboard " if run.dashboard != "all" }}--dashboard-address :0 \
    {{ worker_options | map("quote") | join(" ") }} 2>>"$of_slurm" &
workers=$!

# Waits for {{ workers.count }} worker(s), and then runs the product, which prints how to open the dashboard.
"${one[@]}" --job-name=client bash -c "$known" "$run.client" \
    "$python" -m distmm.submit.ready "$scheduler_file" {{ workers.count }} {{ patience }} -- \
    "$python" -m distmm {{ command[:5] | map("quote") | join(" ") }} \
    {{ command[5:] | map("quote") | join(" ") }} {{ "--deadline " ~ deadline ~ "s " if command[0] != "verify" }}--cluster "$scheduler_file"
{%- if job.overwrite %} $([ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || echo --overwrite){% endif %} \
    2>>"$of_slurm" &
client=$!

warned=
trap 'warned=yes; echo "distmm: the allocation ends soon; stopping"' USR1
alive() { kill -0 "$1" 2>/dev/null; }
# The client runs on this node. TERM is sent to the client and not to srun, which would kill it.
stop_client() {
    [ -s "$run.client.pid" ] && kill -TERM "$(<"$run.client.pid")" && stopped=yes
}

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
{# 137 is 128 + SIGKILL: the client was killed. #}
code=$(cat "$run.client.code" 2>/dev/null || echo 137)
[ -z "$lost" ] && [ "$code" -ne {{ terminated }} ] || code={{ resumable }}
[ "$SECONDS" -lt {{ deadline }} ] || warned=yes    # the client's deadline counts if Slurm's limit was changed
wait "$workers"
[ ! -s "$run.scheduler.pid" ] || kill -TERM "$(<"$run.scheduler.pid")" 2>/dev/null
wait "$scheduler"
rm -f "$scheduler_file" "$run".{scheduler,client}.{pid,code}
[[ $code$lost == 0 || $code$lost == {{ resumable }} ]] || cat "$of_slurm"

# In a preemption with a grace time all steps get TERM. Slurm does not requeue a job that then ends by itself, so this
# script requeues it.
preempted() {
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    [[ $state == *PreemptTime=[0-9]* && $state != *JobState=CANCELLED* ]]
}
if [ "$code" -eq {{ resumable }} ] && { [ -n "$warned" ] || preempted; }; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt {{ run.restarts }} ]; then
        echo "distmm: requeued, to compute the missing blocks"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    fi
    echo "distmm: not requeued: run.restarts is {{ run.restarts }}; submit it again to resume it"
fi
echo "$code" >"$ended"    # Slurm forgets a job some minutes after its end
exit "$code"
