#!/usr/bin/env bash
# Train on this host, with GPUs or TPU chips:  bash launch/gpu.sh configs/kk.py --out runs/kk
# Not run on real hardware yet, only dry. The arguments are those of `jaxrl-llm train`.
# A trainer that dies is started again and resumes from its newest checkpoint; told to stop, it saves. After a reboot (of
# a spot machine, say) the same command goes on; in a crontab: @reboot cd FOLDER && bash launch/gpu.sh ...
set -u
python=.venv/bin/python # which has jaxrl-llm
gpus=                   # the trainer's, such as 2,3,4,5,6,7, where the config gives others to vLLM; empty: all
restarts=20             # of a trainer that failed

export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jaxrl_llm/compiled}"
[ -z "$gpus" ] || export CUDA_VISIBLE_DEVICES="$gpus"
stopped=
trap 'stopped=1 again=1; kill %% 2>/dev/null || exit 75' TERM INT HUP # passed on, so that the trainer saves
for left in $(seq "$restarts" -1 0); do
    "$python" -P -m jaxrl_llm train "$@" --resume auto &
    while # a signal ends `wait`, not the trainer
        again=
        wait $!
        status=$?
        [ -n "$again" ]
    do :; done
    case ${stopped:+stopped}$status in # finished, stopped and saved, or told to stop, however it took that
    0 | 75 | 130 | stopped*) exit "$status" ;;
    esac
    echo "exit code $status; $left restarts are left" >&2
    sleep 30
done
exit "$status"
