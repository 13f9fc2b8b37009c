#!/usr/bin/env bash
# Train on nodes of a Slurm cluster:  sbatch --partition=gpu launch/slurm.sh configs/kk.py --out runs/kk
# Not run on real hardware yet, only dry. The arguments are those of `jaxrl-llm train`. Code, data and run lie on storage
# that all nodes see; relative paths begin where sbatch is called. Preempted, out of time or broken, the job is queued
# again and resumes from its newest checkpoint.
#SBATCH --job-name=kk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# 120 seconds to save in before the time is over: those of --grace (60), and 60 by which Slurm may be early.
set -euo pipefail
python=.venv/bin/python # which has jaxrl-llm
gpus=                   # the trainer's of each node, such as 2,3,4,5,6,7, where the config gives others to vLLM; empty: all
failures=20             # after which it is not queued again; a preemption is none

export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jaxrl_llm/compiled}"
train=("$python" -P -m jaxrl_llm train "$@" --resume auto)
[ "$SLURM_JOB_NUM_NODES" = 1 ] || train+=(--process auto)
[ -z "$gpus" ] || train=(env "CUDA_VISIBLE_DEVICES=$gpus" "${train[@]}") # srun sets the variable anew
mkdir -p logs
cancelled=
trap 'cancelled=1' TERM # from scancel; or from a preemption, after which Slurm queues the job again by itself
status=0
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=240 \
    --open-mode=append --output="logs/$SLURM_JOB_NAME-%t.log" "${train[@]}" || status=$?
echo "exit code $status"
if [ "$status" = 0 ] || [ -n "$cancelled" ]; then
    exit "$status"
elif [ "$status" != 75 ]; then # else it was told to stop, and has saved
    failed=logs/$SLURM_JOB_NAME-$SLURM_JOB_ID.failed
    echo "$(date -Is) exit code $status" >>"$failed" # Slurm's own count has preemptions in it
    [ "$(wc -l <"$failed")" -le "$failures" ] || exit "$status"
fi
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
