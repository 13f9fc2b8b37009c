#!/usr/bin/env bash
# Not run on real hardware yet, only dry. A slice of a Cloud TPU pod, by queued resources.
# Printed by: @printed_by@
# Copies the wheel and the config beside the run, asks for the slice, and asks again whenever it was preempted; when
# the run has ended, gives it back. It can itself be ended and run again: it finds the slice that it asked for.
set -euo pipefail
export CLOUDSDK_CORE_DISABLE_PROMPTS=1
place=@copies@
slice=(@name@ --zone=@zone@)
worker=$(mktemp)
trap 'rm -f "$worker"' EXIT

cat >"$worker" <<'WORKER'
#!/usr/bin/env bash
# On every worker, as root, at every boot.
set -euo pipefail
mkdir -p /opt/jaxrl-llm
cd /opt/jaxrl-llm
cat >run <<'RUN'
#!/usr/bin/env bash
cd /opt/jaxrl-llm || exit
place=@copies@
install() {
    gcloud storage cp "$place/*.whl" "$place/*.py" . &&
        python3 -m pip install -q uv &&
        python3 -m uv venv -q --clear --python 3.12 venv &&
        python3 -m uv pip install -q --python venv/bin/python @wheel_name@ && touch installed
}
for left in $(seq 20 -1 0); do
    { [ -e installed ] || install; } && venv/bin/jaxrl-llm @arguments@
    status=$?
    [ "$status" != 0 ] || break
    echo "exit code $status; $left restarts are left"
    sleep 30
done
me=$(curl -fs -H 'Metadata-Flavor: Google' \
    http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)
if [ "$me" = 0 ]; then # which writes the run
    for _ in $(seq 60); do
        { echo "exit code $status" && journalctl -q -u jaxrl-llm -n 20 -o cat; } |
            gcloud storage cp - "$place/ended" && break
        sleep 30
    done
fi
RUN
systemctl is-active -q jaxrl-llm || systemd-run --unit=jaxrl-llm --setenv=HOME=/root \
    --setenv=JAX_COMPILATION_CACHE_DIR=/opt/jaxrl-llm/compiled \
    --property=TimeoutStopSec=@patience@ bash /opt/jaxrl-llm/run
WORKER

gcloud storage cp @wheel@ @config@ "$place/"
echo "what worker 0 says: gcloud compute tpus tpu-vm ssh ${slice[*]} --worker=0 --command='journalctl -fu jaxrl-llm'"
before='' failed=0
while :; do
    if state=$(gcloud compute tpus queued-resources list --zone=@zone@ \
        --filter='name~(^|/)@name@$' --format='value(state.state)'); then
        [ "$state" = "$before" ] || echo "$(date -Is) $state"
        before=$state
        case $state in
        '')
            gcloud storage rm "$place/ended" 2>/dev/null || true # of an earlier run
            gcloud compute tpus queued-resources create "${slice[@]}" --node-id=@name@ \
                --accelerator-type=@type@ --runtime-version=@runtime@ --spot --async@rights@ \
                --scopes=https://www.googleapis.com/auth/cloud-platform \
                --metadata-from-file=startup-script="$worker" || true # asked again
            ;;
        SUSPENDED | FAILED)
            [ "$state" != FAILED ] || failed=$((failed + 1))
            gcloud compute tpus queued-resources delete "${slice[@]}" --force || true
            if [ "$failed" = 3 ]; then
                echo "the slice was refused three times in a row: look at its type, zone and quota" >&2
                exit 2
            fi
            ;;
        ACTIVE)
            failed=0
            if said=$(gcloud storage cat "$place/ended" 2>/dev/null); then break; fi
            ;;
        esac
    fi
    sleep 60
done
echo "$said"
gcloud compute tpus queued-resources delete "${slice[@]}" --force
grep -qx "exit code 0" <<<"$said"
