#!/usr/bin/env bash
# Every check: lint.sh, then the tests. Arguments go to pytest (a path, -k NAME, -x).
#
# Unit tests, and whole runs of one process, run on two workers; what starts several ranks runs one after the other,
# because each already takes both cores. The last line counts both.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

bash scripts/lint.sh

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0

run_tests() {
    local code=0
    python -m pytest --color=no "$@" | tee -a "$log" || code=$?
    # 5: the arguments selected no test of this kind.
    if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then status=$code; fi
}

count() { # of a word in pytest's closing lines, over both runs
    grep -E '^(=+ )?([0-9]+ |no tests).* in [0-9.]+s' "$log" | { grep -oE "[0-9]+ $1" || true; } | awk '{n += $1} END {print n + 0}'
}

run_tests -n 2 --dist loadfile -m "one_process or not (distributed or launch)" "$@"
run_tests -m "(distributed or launch) and not one_process" "$@"

passed=$(count passed) failed=$(($(count failed) + $(count error)))
echo "$passed passed, $failed failed, $(count skipped) skipped"
if [ "$((passed + failed))" -eq 0 ]; then exit 5; fi
exit "$status"
