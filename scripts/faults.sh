#!/usr/bin/env bash
# The matrix of faults (docs/faults.md): --list, --row NAME, --minutes M, --write. Rows that need root, namespaces or
# strace are skipped where these are missing, and say so.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
exec python scripts/faults/matrix.py "$@"
