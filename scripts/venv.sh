# Sourced by the other scripts: puts a Python environment with ds_encdec first on PATH, and sets ROOT.
#
# The environment is the active one (venv or conda), or else .venv in the repository, made when it is not there.
# Installs there, with ds_encdec from this very clone, only when another clone is installed, or when pyproject.toml or
# constraints.txt have changed since the last time: what runs need, and with EXTRAS=dev before `source` what
# developers need, too.
#
# Packages come from where pip (PIP_*, pip.conf) or uv (UV_*, uv.toml) is told to look. Where neither is told anything
# and there is no GPU, torch comes from PyTorch's own index: the CPU build, a tenth of what PyPI's needs with CUDA.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

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
    install_once "$environment" "${EXTRAS:-}"
}

install_once() { # ENVIRONMENT EXTRAS
    local python="$1/bin/python" extras="$2" stamp="$1/.ds_encdec-installed" log="$1/.ds_encdec-install.log"
    local wanted there installer how
    wanted="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    there=$(cat "$stamp" 2>/dev/null)
    case "$there" in
        "$wanted dev") return ;;
        "$wanted") [ -n "$extras" ] || return 0 ;;
        *" dev") extras=dev ;; # an environment that has these keeps them up to date
    esac

    installer=("$python" -m pip install --disable-pip-version-check --no-compile) # a part is ever imported
    if command -v uv >/dev/null && { uv_is_told || ! pip_is_told "$python"; }; then
        installer=(uv pip install --python "$python")
    fi
    case "${installer[0]}" in uv) how=uv ;; *) how=pip ;; esac
    echo "installing ds_encdec${extras:+[$extras]} and its requirements into $1, by $how, once" >&2
    echo "  (2 GB; a minute of work and the downloads; to watch it: tail -f $log)" >&2
    : >"$log"
    if wants_cpu_torch "$python"; then
        logged "$log" "${installer[@]}" --no-deps --constraint "$ROOT/constraints.txt" \
            --index-url "$TORCH_CPU_INDEX" torch || return 1
    fi
    logged "$log" "${installer[@]}" --constraint "$ROOT/constraints.txt" \
        --editable "$ROOT${extras:+[$extras]}" || return 1
    echo "$wanted${extras:+ $extras}" >"$stamp"
}

pip_is_told() { # PYTHON: whether its pip is configured to look somewhere
    grep -Eq '\.(index-url|extra-index-url|find-links|no-index|constraint)=' <<<"$("$1" -m pip config list 2>/dev/null)"
}

uv_is_told() {
    grep -Eq '^UV_((DEFAULT_|EXTRA_)?INDEX(_URL)?|FIND_LINKS|NO_INDEX|OFFLINE|CONSTRAINT|TORCH_BACKEND|CONFIG_FILE)=' <<<"$(env)" ||
        grep -Eqs 'index|find-links|constraint|torch-backend' "${XDG_CONFIG_HOME:-$HOME/.config}/uv/uv.toml" /etc/uv/uv.toml
}

wants_cpu_torch() { # PYTHON: whether torch is to come from its CPU index; says so, and why if that cannot be
    [ "$(uname -s)" = Linux ] || return # elsewhere PyPI's build is without CUDA
    ! uv_is_told && ! pip_is_told "$1" && ! nvidia-smi -L >/dev/null 2>&1 || return # for ROCm they are told
    ! "$1" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || return # there is one
    if env ${PIP_CERT:+"SSL_CERT_FILE=$PIP_CERT"} timeout 5 "$1" - "$TORCH_CPU_INDEX/torch/" 2>/dev/null <<'END_PYTHON'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).read(1)
END_PYTHON
    then
        echo "there is no GPU here: torch's CPU build is taken, from $TORCH_CPU_INDEX" >&2
    else
        echo "there is no GPU here, but $TORCH_CPU_INDEX has not answered within 5 s:" \
            "torch is PyPI's, with about 3 GB of CUDA" >&2
        return 1
    fi
}

logged() { # LOG COMMAND...: what it prints goes into the log, whose end is shown if it fails
    local log="$1" status=0 began=$SECONDS
    shift
    "$@" >>"$log" 2>&1 || status=$?
    if [ "$status" = 0 ]; then
        echo "  done in $((SECONDS - began)) s" >&2
    else
        tail -n 20 "$log" >&2
        echo "error: this failed ($status): $*" >&2
    fi
    return "$status"
}

enter_environment || exit 1
