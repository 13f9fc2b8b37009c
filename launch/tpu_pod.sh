#!/usr/bin/env bash
# Train on a slice of a Cloud TPU pod, by queued resources:  bash launch/tpu_pod.sh configs/kk.py --steps 500
# Not run on real hardware yet, only dry. Run it where gcloud is set up, and let it run. The first argument is a config that
# loads no other file, the others are flags of `jaxrl-llm train`.
# Copies the wheel and the config beside the run, asks for the slice, and asks again whenever it was preempted; when
# the run has ended, gives it back. It can itself be ended and run again: it finds the slice that it asked for.
set -euo pipefail
name=kk                                # of the slice
type=v5litepod-16                      # or v4-N, v5p-N, v6e-N
runtime=v2-alpha-tpuv5-lite            # for v4 tpu-ubuntu2204-base, for v5p v2-alpha-tpuv5, for v6e v2-alpha-tpuv6e
zone=us-west4-a
out=gs://bucket/runs/kk                # the run: workers share nothing but a bucket
wheel=jaxrl_llm-0.1.0-py3-none-any.whl # made by: pip wheel --no-deps .
account=                               # the workers', with access to the bucket; empty: the project's
patience=120                           # seconds to save in when told to stop: those of --grace (60), and a minute
restarts=20                            # of a trainer that failed

export CLOUDSDK_CORE_DISABLE_PROMPTS=1
config=${1-}
if [[ $out != gs://* || ! -f $wheel || ! -f $config ]]; then
    echo "usage: $0 CONFIG FLAGS...; \`out\` has to be gs://..., $wheel and the config have to be here" >&2
    exit 2
fi
shift
package="./${wheel##*/}[tpu,gcs]" place=$out-launch
arguments=(train "${config##*/}" --out "$out" "$@" --resume auto --process auto)
slice=("$name" --zone="$zone")
worker=$(mktemp)
trap 'rm -f "$worker"' EXIT

{
    echo '#!/usr/bin/env bash'
    declare -p place package arguments patience restarts
    cat <<'WORKER'
# On every worker, as root, at every boot.
set -euo pipefail
mkdir -p /opt/jaxrl-llm
cd /opt/jaxrl-llm
{
    declare -p place package arguments restarts
    cat <<'RUN'
cd /opt/jaxrl-llm || exit
install() {
    gcloud storage cp "$place/*.whl" "$place/*.py" . &&
        python3 -m pip install -q uv &&
        python3 -m uv venv -q --clear --python 3.12 venv &&
        python3 -m uv pip install -q --python venv/bin/python "$package" && touch installed
}
for left in $(seq "$restarts" -1 0); do
    { [ -e installed ] || install; } && venv/bin/jaxrl-llm "${arguments[@]}"
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
} >run
systemctl is-active -q jaxrl-llm || systemd-run --unit=jaxrl-llm --setenv=HOME=/root \
    --setenv=JAX_COMPILATION_CACHE_DIR=/opt/jaxrl-llm/compiled \
    --property=TimeoutStopSec="$patience" bash /opt/jaxrl-llm/run
WORKER
} >"$worker"

gcloud storage cp "$wheel" "$config" "$place/"
echo "what worker 0 says: gcloud compute tpus tpu-vm ssh ${slice[*]} --worker=0 --command='journalctl -fu jaxrl-llm'"
before='' refused=0
while :; do
    if state=$(gcloud compute tpus queued-resources list --zone="$zone" \
        --filter="name~(^|/)$name\$" --format='value(state.state)'); then
        [ "$state" = "$before" ] || echo "$(date -Is) $state"
        before=$state
        case $state in
        '')
            gcloud storage rm "$place/ended" 2>/dev/null || true # of an earlier run
            gcloud compute tpus queued-resources create "${slice[@]}" --node-id="$name" \
                --accelerator-type="$type" --runtime-version="$runtime" --spot --async \
                ${account:+--service-account="$account"} \
                --scopes=https://www.googleapis.com/auth/cloud-platform \
                --metadata-from-file=startup-script="$worker" || true # asked again
            ;;
        SUSPENDED | FAILED)
            [ "$state" != FAILED ] || refused=$((refused + 1))
            gcloud compute tpus queued-resources delete "${slice[@]}" --force || true
            if [ "$refused" = 3 ]; then
                echo "the slice was refused three times in a row: look at its type, zone and quota" >&2
                exit 2
            fi
            ;;
        ACTIVE)
            refused=0
            if said=$(gcloud storage cat "$place/ended" 2>/dev/null); then break; fi
            ;;
        esac
    fi
    sleep 60
done
echo "$said"
gcloud compute tpus queued-resources delete "${slice[@]}" --force
grep -qx "exit code 0" <<<"$said"
