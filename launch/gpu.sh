#!/usr/bin/env bash
# Install jaxrl_llm for cuda into .venv (once) and run a command of it: launch/gpu.sh train configs/kk.py
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x .venv/bin/jaxrl-llm ]; then
    python3 -m venv .venv
    .venv/bin/pip install -e '.[cuda]'
fi
exec .venv/bin/jaxrl-llm "$@"
