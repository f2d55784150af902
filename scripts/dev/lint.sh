#!/usr/bin/env bash
# Style, types, and whether the generated reference, the lock and the snapshot of DeepSpeed's keys are up to date.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
cd "$ROOT"

ruff check
ruff format --check
mypy
python scripts/dev/config_reference.py --check
python scripts/dev/deepspeed_keys.py --check
python scripts/dev/lock.py --check
