#!/usr/bin/env bash
# Every check: lint.sh, then the tests. Arguments go to pytest (a path, -k NAME, -x).
#
# Three workers keep two cores busy, because many tests wait: for a launcher, for ranks, for a timeout that must pass.
# The tests of a file share what it has started, and so a worker.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Hundreds of processes are started: without the byte code of the first, each compiles torch and DeepSpeed from source,
# which takes it three times as long.
unset PYTHONDONTWRITEBYTECODE

bash scripts/dev/lint.sh
exec python -m pytest --color=no -n 3 --dist loadfile "$@"
