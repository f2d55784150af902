#!/usr/bin/env bash
# The study of quality (docs/quality.md) with 24 layers on one GPU: ten minutes at most, no network. Called again it goes
# on where it ended.
#
#   scripts/gpu/quality.sh [FOLDER]             trains a source and its arms; FOLDER/runs/*.json, tables.md, curves.svg
#   scripts/gpu/quality.sh --dry-run [FOLDER]   the same on a CPU with a tiny source, in about two minutes
#
# PYTHON names another interpreter than python3, SECONDS_AT_MOST another time (default: 540).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
size=(--size gpu --device cuda)
if [ "${1:-}" = --dry-run ]; then
    size=(--size ci)
    shift
fi
folder="${1:-quality}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
study=("${PYTHON:-python3}" scripts/bench/quality.py)
code=0
timeout "${SECONDS_AT_MOST:-540}" "${study[@]}" run "${size[@]}" --folder "$folder" || code=$?
[ "$code" = 0 ] || [ "$code" = 124 ] || exit "$code"
"${study[@]}" table "${size[@]}" --folder "$folder" --out "$folder/curves.svg" | tee "$folder/tables.md"
[ "$code" = 0 ] || echo "ended after its time: call it again to go on" >&2
