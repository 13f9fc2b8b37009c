#!/usr/bin/env bash
# Not run on real hardware yet, only dry. Slurm: one task a node, the sidecars beside it.
# Printed by: @printed_by@
# Hand it to sbatch, whose flags go before these (sbatch --partition=gpu --account=me FILE). Code, data and run lie on
# storage that all nodes see. Preempted, out of time or broken, the job is queued again and goes on from its newest
# checkpoint.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus@
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=@minutes@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@@patience@
set -euo pipefail
cd -- @folder@
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jaxrl_llm/compiled}"
mkdir -p logs
cancelled=
trap 'cancelled=1' TERM # from scancel; or from a preemption, after which Slurm queues the job again by itself
status=0
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=@twice@ \
    --open-mode=append --output=logs/@name@-%t.log \
    @command@ || status=$?
echo "exit code $status"
if [ "$status" = 0 ] || [ -n "$cancelled" ]; then
    exit "$status"
elif [ "$status" != 75 ]; then # else it was told to stop, and has saved
    failed=logs/@name@-$SLURM_JOB_ID.failed
    echo "$(date -Is) exit code $status" >>"$failed" # Slurm's own count has preemptions in it
    [ "$(wc -l <"$failed")" -le 20 ] || exit "$status"
fi
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
