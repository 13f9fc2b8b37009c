#!/usr/bin/env bash
# Not run on real hardware yet, only dry. One host with GPUs or TPU chips.
# Printed by: @printed_by@
# A trainer that dies is started again and goes on from its newest checkpoint. After a reboot (a spot machine that
# comes back) the same script goes on: crontab, "@reboot bash THIS_FILE". Told to stop, it has the trainer save.
set -u
cd -- @folder@ || exit
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jaxrl_llm/compiled}"
told=
trap 'told=1 again=1; kill %% 2>/dev/null || exit 75' TERM INT HUP
for left in $(seq 20 -1 0); do
    @command@ &
    while
        again=
        wait $!
        status=$?
        [ -n "$again" ]
    do :; done
    case ${told:+told}$status in # finished, or stopped; or told to stop, however it took that
    0 | 75 | 130 | told*) exit "$status" ;;
    esac
    echo "exit code $status; $left restarts are left" >&2
    sleep 30
done
exit "$status"
