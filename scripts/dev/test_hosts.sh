#!/usr/bin/env bash
# The tests on several hosts, which are namespaces of this machine (tests/hosts). Arguments go to pytest (-x, -k NAME).
#
# Skipped where the Debian packages that they need, root or namespaces are missing; each says which.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
cd "$ROOT"
# Two at a time, each on hosts of its own: most of every test is waiting.
exec python -m pytest --color=no tests/hosts -m hosts -n 2 --dist loadfile "$@"
