#!/usr/bin/env bash
# The tests on several hosts, which are namespaces of this machine (tests/hosts). Arguments go to pytest (-x, -k NAME).
#
# Skipped where the Debian packages that they need, root or namespaces are missing; each says which.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
exec python -m pytest --color=no tests/hosts -m hosts "$@"
