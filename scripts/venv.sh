# Sourced by the other scripts: puts a Python environment with ds_encdec first on PATH, and sets ROOT.
#
# An active environment (venv or conda) is used as it is; otherwise .venv in the repository, made when it is not
# there. Installs only when pyproject.toml or constraints.txt have changed since the last time. Which index pip
# reads, and so which build of torch it finds, is pip's own configuration (PIP_INDEX_URL, pip.conf).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3" >&2
    return 1
}

enter_environment() {
    local environment="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" python
    if [ -z "$environment" ]; then
        environment="$ROOT/.venv"
        if [ ! -x "$environment/bin/python" ]; then
            python=$(find_python) || return 1
            echo "making $environment" >&2
            "$python" -m venv "$environment" || { rm -rf "$environment"; return 1; }
        fi
    fi
    export PATH="$environment/bin:$PATH"
    install_once "$environment"
}

install_once() {
    local stamp="$1/.ds_encdec-installed" wanted
    wanted="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    echo "installing ds_encdec and its dependencies into $1 (a minute or two, once)" >&2
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$ROOT/constraints.txt" --editable "$ROOT[dev]" || return 1
    echo "$wanted" >"$stamp"
}

enter_environment || exit 1
