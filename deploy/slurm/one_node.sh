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
#SBATCH --partition=gpu
#SBATCH --requeue

# One allocation, in which srun starts the scheduler, the workers and the client. Before the walltime (or a preemption)
# Slurm sends USR1 to this script alone. The script stops the client, which keeps all finished blocks and exits with 75,
# and the job requeues itself until C is complete. scancel ends the job for good and keeps all finished blocks: submit
# it again to go on.
set -uo pipefail
umask 077
python=/shared/venv/bin/python
folder=/scratch/project/run
run=$folder/distmm-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
scheduler_file=$run.scheduler.json

# Work stealing ignores placement. Dask counts a dead worker as a failure of each of its tasks, and allows 3.
export DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING=False
export DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=100
export DASK_LOGGING__DISTRIBUTED=warning
export OMP_NUM_THREADS=8 OPENBLAS_NUM_THREADS=8 MKL_NUM_THREADS=8 NUMBA_NUM_THREADS=8
export DASK_DISTRIBUTED__DASHBOARD__LINK=http://localhost:8787/status

# UCX if there are GPUs and its Python package, else TCP; the InfiniBand interface if there is one.
fabric=$("$python" -m distmm.submit.fabric gpu auto) || exit 2
read -r protocol interface <<<"$fabric"
network=(--protocol "$protocol" ${interface:+--interface "$interface"})

# Scheduler and client run beside the workers of the first node (--overlap); only the workers' step takes the GPUs.
one=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --cpus-per-task=1 --gres=none)

"${one[@]}" --job-name=scheduler "$python" -m dask scheduler --port 0 --scheduler-file "$scheduler_file" \
    "${network[@]}" --dashboard-address 127.0.0.1:0 &
scheduler=$!

# One process a node, which starts one worker for each of its GPUs; 112 GB of host memory each.
srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=64 --gres=gpu:8 --job-name=workers \
    bash -c 'exec "$@" --name "$SLURMD_NODENAME"' worker \
    "$python" -m dask cuda worker --scheduler-file "$scheduler_file" "${network[@]}" \
    --nthreads 3 --memory-limit 111500000000 --dashboard-address 127.0.0.1:0 \
    --rmm-pool-size 0.8 --set-rmm-allocator-for-libs cupy --device-memory-limit 0 --preload distmm.worker.gpu_memory &
workers=$!

# Waits for 8 worker(s), prints how to reach the dashboard, and then runs the product.
"${one[@]}" --job-name=client "$python" -m distmm.submit.ready "$scheduler_file" 8 600 -- \
    "$python" -m distmm multiply /scratch/project/A.zarr /scratch/project/B.zarr -o /scratch/project/C.zarr \
    --precision highest --check freivalds --device gpu --cluster "$scheduler_file" &
client=$!

warned=
trap 'warned=yes; echo "distmm: the allocation ends soon; stopping"' USR1
alive() { kill -0 "$1" 2>/dev/null; }
# TERM goes to the step itself: srun would kill what it started.
stop_client() {
    step=$(squeue --noheader --steps --jobs "$SLURM_JOB_ID" --format "%j %i" | awk '$1 == "client" {print $2}')
    [ -n "$step" ] || return
    scancel --signal=TERM "$step" 2>/dev/null    # fails even if it has signalled; a second TERM would kill
    stopped=yes
}

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
[ -z "$lost" ] || code=75
wait "$workers" "$scheduler"
rm -f "$scheduler_file"

# A job that is preempted with a grace time gets TERM in all steps. If it ended by itself, it would not be requeued.
preempted() {
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    [[ $state == *PreemptTime=[0-9]* && $state != *JobState=CANCELLED* ]]
}
if { [ -n "$warned" ] || preempted; } && [ "$code" -eq 75 ] &&
    [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    echo "distmm: requeued, to go on with what is missing"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
