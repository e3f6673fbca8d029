#!/bin/bash
#SBATCH --job-name=distmm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=858306M
#SBATCH --gres=gpu:8
#SBATCH --time=240
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
#SBATCH --output=/scratch/project/run/distmm-%j.log
#SBATCH --error=/scratch/project/run/distmm-%j.slurm
#SBATCH --partition=gpu
#SBATCH --requeue

# One allocation, in which srun starts the scheduler, the workers and the client. Before the walltime (or a preemption)
# Slurm sends USR1 to this script alone. The script then stops the client, which keeps all finished blocks and exits
# with 75, and the job requeues itself until C is complete. scancel ends the job without a requeue and keeps all
# finished blocks: submit it again to resume it.
exec 2>&1    # only Slurm writes to the error file, for instance when it ends a step, which is no error here
set -uo pipefail
python=/shared/venv/bin/python
folder=/scratch/project/run
run=$folder/distmm-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
scheduler_file=$run.scheduler.json
ended=$folder/distmm-$SLURM_JOB_ID.exit
of_slurm=$folder/distmm-$SLURM_JOB_ID.slurm
rm -f "$ended"

# Work stealing ignores placement. Dask counts a dead worker as a failure of each of its tasks, and by default allows 3.
export DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING=False
export DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=100
# The scheduler's warnings about lost workers name all tasks that they had, and a worker that ends while it runs a task
# warns of that task; errors are logged.
export DASK_LOGGING="{'distributed': 'warning', 'distributed.scheduler': 'error', 'distributed.worker.state_machine': 'error'}"
export OMP_NUM_THREADS=8 OPENBLAS_NUM_THREADS=8 MKL_NUM_THREADS=8 NUMBA_NUM_THREADS=8
export DASK_DISTRIBUTED__DASHBOARD__LINK=http://localhost:8787/status
export UCX_MEMTYPE_CACHE=n

# UCX for GPUs if its Python package is installed, else TCP; the InfiniBand interface if there is one.
fabric=$("$python" -m distmm.submit.fabric gpu auto) || exit 2
read -r protocol interface <<<"$fabric"
network=(--protocol "$protocol" ${interface:+--interface "$interface"})

# Scheduler and client share the first node with its workers (--overlap); only the workers' step takes the GPUs.
one=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --cpus-per-task=1 --gres=none)

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
    "$python" -m dask scheduler --port 0 --scheduler-file "$scheduler_file" "${network[@]}" --dashboard-address 127.0.0.1:0 \
    2>>"$of_slurm" &
scheduler=$!

# One process a node, which starts one worker for each of its GPUs; 112 GB of host memory each.
srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=64 --gres=gpu:8 --job-name=workers \
    bash -c "$keep" worker \
    "$python" -m dask cuda worker --scheduler-file "$scheduler_file" "${network[@]}" \
    --nthreads 3 --memory-limit 111500000000 --no-dashboard --dashboard-address :0 \
    --rmm-pool-size 0.8 --set-rmm-allocator-for-libs cupy --device-memory-limit 0 --preload distmm.worker.gpu_memory 2>>"$of_slurm" &
workers=$!

# Waits for 8 worker(s), and then runs the product, which prints how to open the dashboard.
"${one[@]}" --job-name=client bash -c "$known" "$run.client" \
    "$python" -m distmm.submit.ready "$scheduler_file" 8 600 -- \
    "$python" -m distmm multiply /scratch/project/A.zarr /scratch/project/B.zarr -o /scratch/project/C.zarr \
    --precision highest --check freivalds --device gpu --deadline 13800s --cluster "$scheduler_file" \
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
code=$(cat "$run.client.code" 2>/dev/null || echo 137)
[ -z "$lost" ] && [ "$code" -ne 143 ] || code=75
[ "$SECONDS" -lt 13800 ] || warned=yes    # the client's deadline counts if Slurm's limit was changed
wait "$workers"
[ ! -s "$run.scheduler.pid" ] || kill -TERM "$(<"$run.scheduler.pid")" 2>/dev/null
wait "$scheduler"
rm -f "$scheduler_file" "$run".{scheduler,client}.{pid,code}
[[ $code$lost == 0 || $code$lost == 75 ]] || cat "$of_slurm"

# In a preemption with a grace time all steps get TERM. Slurm does not requeue a job that then ends by itself, so this
# script requeues it.
preempted() {
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    [[ $state == *PreemptTime=[0-9]* && $state != *JobState=CANCELLED* ]]
}
if [ "$code" -eq 75 ] && { [ -n "$warned" ] || preempted; }; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
        echo "distmm: requeued, to compute the missing blocks"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    fi
    echo "distmm: not requeued: run.restarts is 100; submit it again to resume it"
fi
echo "$code" >"$ended"    # Slurm forgets a job some minutes after its end
exit "$code"
