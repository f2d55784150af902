#!/usr/bin/env bash
# The study of quality (docs/quality.md) on one GPU: 24 layers, about ten minutes, no network; goes on where it ended.
#
#   scripts/gpu/quality.sh [FOLDER]             trains a source and its arms; FOLDER/runs/*.json, tables, a drawing
#   scripts/gpu/quality.sh --dry-run [FOLDER]   the same on a CPU with a tiny source, in about two minutes
#
# PYTHON names another interpreter than python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
size=(--size gpu --device cuda)
if [ "${1:-}" = --dry-run ]; then
    size=(--size ci)
    shift
fi
folder="${1:-quality}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"${PYTHON:-python3}" scripts/bench/quality.py run "${size[@]}" --folder "$folder"
"${PYTHON:-python3}" scripts/bench/quality.py table "${size[@]}" --folder "$folder" --out "$folder/curves.svg" | tee "$folder/tables.md"
