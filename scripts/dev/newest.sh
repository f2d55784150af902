#!/usr/bin/env bash
# The newest release of everything, in an environment of its own, and the tests of model, evaluate, checkpoint, engine,
# data and memory on it: a green run may raise the upper ends in pyproject.toml. Gigabytes are downloaded.
#
#   scripts/dev/newest.sh [--beyond | --oldest] [--dry-run] [FOLDER] [-- PYTEST_ARGUMENT...]
#
# FOLDER: where the environment is made or brought up to date, outside of the repository (default: a temporary one, which
# is removed). --beyond: the upper ends are ignored. --oldest: the lower ends instead, of what has an upper one.
# --dry-run: prints what would be installed and run.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu # also named in scripts/venv.sh
end=newest dry="" folder=""
while [ $# -gt 0 ]; do
    case "$1" in
        --beyond | --oldest) end=${1#--} ;;
        --dry-run) dry=yes ;;
        --) shift && break ;;
        -*) echo "error: $1 is no option of this script (--beyond, --oldest, --dry-run)" >&2 && exit 2 ;;
        *) [ -z "$folder" ] || { echo "error: one folder, not $folder and $1" >&2 && exit 2; }; folder="$1" ;;
    esac
    shift
done
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
folder=$(realpath -m "$folder")
case "$folder/" in "$ROOT"/*) echo "error: $folder is inside the repository; name a folder outside" >&2 && exit 2 ;; esac

step() {
    echo "+ $*"
    [ -n "$dry" ] || "$@"
}

python="$folder/bin/python"
pip=("$python" -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager)
step "${PYTHON:-python3}" -m venv "$folder"
step "${pip[@]}" packaging
requirements() { # WHICH NAME...
    PYTHONPATH="$ROOT" "$([ -x "$python" ] && echo "$python" || echo "${PYTHON:-python3}")" \
        "$ROOT/scripts/dev/requirements.py" "$@"
}
wanted=("${pip[@]}")
torch=$(requirements newest torch)
case "$end" in
    beyond) torch=torch ;;
    oldest)
        torch=$(requirements oldest torch)
        # triton 3.6, which torch 2.11 brings, interprets kernels on no newer numpy.
        wanted+=('numpy<2.4')
        ;;
esac
[ "$end" = newest ] || while IFS= read -r line; do wanted+=("$line"); done < <(requirements "$end")
if [ -n "$dry" ] || curl --silent --fail --max-time 5 --output /dev/null "$TORCH_CPU_INDEX/torch/"; then
    step "${pip[@]}" --index-url "$TORCH_CPU_INDEX" "$torch"
else
    echo "$TORCH_CPU_INDEX does not answer: torch comes from where pip looks, perhaps with CUDA"
fi
if [ "$end" = beyond ]; then
    step "${wanted[@]}"
    step "${pip[@]}" --no-deps --editable "$ROOT"
else
    step "${wanted[@]}" --editable "$ROOT[dev]"
fi
step "$python" -m pip freeze --exclude-editable
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
step "$python" -m pytest --color=no -n 2 --dist loadfile -p no:cacheprovider \
    tests/memory tests/model tests/evaluate tests/checkpoint tests/engine tests/data "$@"
