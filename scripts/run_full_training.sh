#!/usr/bin/env bash
# The whole pre-training: sanity_check, validation, medium, full, each behind the gate of the one before (docs/phases.md).
#
#   scripts/run_full_training.sh [HOSTFILE] [argument of `ds-encdec phases` ...] [section.field=value ...]
#   scripts/run_full_training.sh --dry-run --tokens-per-second 400000 --price-per-gpu-hour 3
#   scripts/run_full_training.sh hostfiles/8gpu infra.output_dir=/data/run
#
# Without a host file: infra.num_gpus ranks on this machine. Called again it goes on where it stopped.
# Another configuration than the shipped one: --config FILE. Variables before the command, which its arguments replace:
#
#   PHASE=validation MODEL_PATH=Qwen/Qwen3-0.6B DATASET=HuggingFaceFW/fineweb-edu OUTPUT_DIR=/data/run scripts/run_full_training.sh
#
# PHASE: sanity_check, validation, medium or full alone, or all; MODEL_PATH: the model to start from.
set -euo pipefail

case "${1-}" in -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

hostfile=""
case "${1-}" in
    "" | -* | *=*) ;;
    *)
        [ -f "$1" ] || { echo "error: there is no host file $1" >&2; exit 2; }
        hostfile=$1
        shift ;;
esac

settings=() given=" $* "
unless_given() { # the field and its value, where no argument has that field, with its section or without
    case "$given" in *[\ .-]"${1#*.}"[=\ ]*) return ;; esac
    [ -z "$2" ] || settings+=("$1=$2")
}
case "$given" in
    *" --only"[=\ ]* | *" --from"[=\ ]* | *" --to"[=\ ]*) ;;
    *) [ "${PHASE:-all}" = all ] || settings+=(--only "$PHASE") ;;
esac
unless_given model.model_name_or_path "${MODEL_PATH:-}"
unless_given data.dataset_name "${DATASET:-}"
unless_given infra.output_dir "${OUTPUT_DIR:-}"

source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
launcher=()
if [ -n "$hostfile" ]; then
    hosts=$(python -m ds_encdec.config.hostfile "$hostfile" | cut -d ' ' -f 1)
    case "$hosts" in
        *$'\n'*) ;;
        localhost | 127.* | "$(hostname)" | "$(hostname -s)") alone="--no_ssh_check --master_addr 127.0.0.1" ;;
    esac # one host, this one: no ssh is needed
    launcher=(--launcher "deepspeed --hostfile $(printf %q "$hostfile") ${alone:-}")
fi
exec ds-encdec phases --config "$ROOT/ds_configs/qwen3_0.6b_ul2.yaml" \
    ${launcher[@]+"${launcher[@]}"} ${settings[@]+"${settings[@]}"} "$@"
