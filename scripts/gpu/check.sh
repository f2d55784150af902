#!/usr/bin/env bash
# Runs everything that wants a GPU, in at most ten minutes, on a machine with Python 3.11 or newer, torch with CUDA
# (2.11 or newer) and one GPU; needs no network.
#
#   scripts/gpu/check.sh [--out FOLDER] [--seconds N] [--only WORD] ...   measures; see check.py
#   WHEELS=FOLDER scripts/gpu/check.sh                             first installs FOLDER/*.whl into a folder of its own
#   scripts/gpu/check.sh --dry-run                                 tries every part on a CPU, with tiny models
#   python scripts/gpu/report.py gpu_check/gpu.json                what BENCHMARKS.md, docs and the estimate should say
#
# Ends with 0 if all parts passed. PYTHON names another interpreter than python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
if [ -z "${PYTHON:-}${VIRTUAL_ENV:-}${WHEELS:-}" ] && [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$WHEELS"/*.whl
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [[ " $* " != *" --dry-run "* && " $* " != *" -h "* && " $* " != *" --help "* ]]; then
    given="${PYTORCH_ALLOC_CONF:-}" tried=0
    export PYTORCH_ALLOC_CONF="${given:-expandable_segments:True}" # as a run has it
    "$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit(3); torch.ones(1, device="cuda")' || tried=$?
    if [ "$tried" = 3 ]; then
        echo "error: torch finds no GPU here: $0 --dry-run tries every part on a CPU" >&2
        exit 2
    elif [ "$tried" != 0 ] && [ -z "$given" ]; then # some virtual machines have no such memory
        echo "the first tensor cannot be made; going on without expandable segments of memory"
        export PYTORCH_ALLOC_CONF=expandable_segments:False
    fi
fi
"$python" scripts/gpu/check.py "$@"
