#!/usr/bin/env bash
# The tests on several hosts, which are namespaces of this machine (tests/hosts). Arguments go to pytest (-x, -k NAME).
#
# As root, installs the Debian packages that they need. Without those, root or namespaces they are skipped, and say why.
set -euo pipefail
EXTRAS=dev source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"

packages=(openssh-server pdsh slurm-wlm munge openmpi-bin mpich iproute2 procps)
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg --status "${packages[@]}" >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    timeout 60 apt-get -qq update &&
        timeout 180 apt-get -qq install --yes --no-install-recommends "${packages[@]}" >/dev/null ||
        echo "apt-get has not installed ${packages[*]}" >&2
fi
exec python -m pytest --color=no tests/hosts -m hosts "$@"
