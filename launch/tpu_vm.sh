#!/usr/bin/env bash
# Install jaxrl_llm for tpu into .venv (once) and run a command of it: launch/tpu_vm.sh train configs/kk.py
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x .venv/bin/jaxrl-llm ]; then
    python3 -m venv .venv
    .venv/bin/pip install -e '.[tpu]'
fi
exec .venv/bin/jaxrl-llm "$@"
