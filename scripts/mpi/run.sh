#!/usr/bin/env bash
# Starts a training run with mpirun, be it Open MPI's, MPICH's or Intel MPI's; mpi4py is not needed.
#
#   scripts/mpi/run.sh HOSTFILE [--config FILE] [argument of train.py ...] [section.field=value ...]
#   scripts/mpi/run.sh hostfiles/2node_8gpu --config ds_configs/qwen3_0.6b_ul2.yaml
#
# HOSTFILE: lines `HOST slots=RANKS`. The ranks meet on its first host: MASTER_ADDR and MASTER_PORT say otherwise.
# MPIRUN: another mpirun than the first on PATH. MPIRUN_ARGS: further words for it.
# To other hosts Open MPI hands on the variables that begin as below (FORWARDED); Hydra, all.
set -euo pipefail
FORWARDED='^((MASTER|PYTORCH|TORCH|OMP|NCCL|RCCL|GLOO|UCX|HF|WANDB|DS)_|PYTHON|(PATH|LD_LIBRARY_PATH|CUDA_HOME)$)'

case "${1-}" in "" | -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
hostfile="$1" mpirun="${MPIRUN:-mpirun}"
shift

source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"
found=$(python -m ds_encdec.config.hostfile "$hostfile") # names every mistake
hosts=$(tr ' ' : <<<"$found" | paste -sd, -)
ranks=$(awk '{ ranks += $2 } END { print ranks }' <<<"$found")
export MASTER_ADDR="${MASTER_ADDR:-${hosts%%:*}}" MASTER_PORT="${MASTER_PORT:-$((20000 + RANDOM % 10000))}"

version=$("$mpirun" --version 2>&1) || { echo "error: $mpirun --version fails: $version" >&2; exit 2; }
case "$version" in
    *"Open MPI"* | *OpenRTE*) # it forwards what it is asked to, and would bind each rank to a core
        launch=(--host "$hosts" --bind-to none)
        while IFS= read -r name; do launch+=(-x "$name"); done < <(compgen -e | grep -E "$FORWARDED") ;;
    *) launch=(-hosts "$hosts") ;; # Hydra, which forwards everything
esac
# shellcheck disable=SC2086  # several words
exec "$mpirun" -n "$ranks" "${launch[@]}" ${MPIRUN_ARGS:-} "$(command -v python)" -u "$ROOT/ds_encdec/train.py" "$@"
