#!/usr/bin/env bash
# The matrix of faults (docs/faults.md). Rows that need root, namespaces or strace are skipped without, with the reason.
#
#   ./scripts/faults.sh                       all rows: over an hour on two cores
#   ./scripts/faults.sh --row killed-rank     one row, or several
#   ./scripts/faults.sh --minutes 5           what the suite does not run, with few repetitions
#   ./scripts/faults.sh --write               what is seen goes into docs/faults.md
#
# It installs the package with its `dev` extra, as the tests do.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;; esac
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
exec python scripts/faults/matrix.py "$@"
