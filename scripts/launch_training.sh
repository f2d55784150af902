#!/usr/bin/env bash
# Starts a training run on this machine or on the hosts of a file, with its environment and a folder of its own.
#
#   scripts/launch_training.sh [--hostfile FILE] [--config FILE] [argument of train.py ...] [section.field=value | --word value ...]
#   scripts/launch_training.sh --hostfile hostfiles/2node_8gpu --config ds_configs/qwen3_0.6b_ul2.yaml
#   scripts/launch_training.sh --resume auto infra.output_dir=output/qwen3_0.6b_ul2-20260101-120000
#
# Without a host file: infra.num_gpus ranks here. Variables before the command:
#
#   OUTPUT_DIR          folder of the runs' folders, CONFIG-DATE-TIME each (default: output in the repository);
#                       infra.output_dir=FOLDER names the run's itself
#   WANDB_PROJECT       where the configuration names none (default: qwen3-encoder-decoder)
#   MASTER_PORT         where ranks meet (default: one of 20000 to 29999, by chance)
#
# Other hosts get these and the variables that begin as below (FORWARDED), but no tokens or keys: DeepSpeed writes them
# into command lines (nor do those that it hands on itself, such as MLFLOW_TRACKING_TOKEN; a proxy's URL with a password
# is left out, too). Log in there (`hf auth login`, `wandb login`). More: a NAME=value line each in .deepspeed_env.
set -euo pipefail
FORWARDED='^((PYTORCH|TORCH|OMP|NCCL|RCCL|GLOO|FI|HF|WANDB|TRITON)_|(PATH|LD_LIBRARY_PATH|CUDA_HOME|DS_ACCELERATOR)$)'
SECRET='(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$'

case "${1-}" in -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

config="" hostfile="" output="" resume=() options=() words=()
while [ $# -gt 0 ]; do
    case "$1" in
        --config=*) config="${1#*=}" ;;
        --hostfile=*) hostfile="${1#*=}" ;;
        infra.output_dir=* | --infra.output_dir=* | output_dir=* | --output_dir=*)
            output="${1#*=}" output="${output/#\~\//$HOME/}" ;;
        --profile=* | -q | --quiet | -v | --verbose) options+=("$1") ;;
        --resume=* | --resume_from=* | --resume_from_checkpoint=*) resume+=("$1") ;;
        --allow-data-change | --allow_data_change) resume+=("--allow-data-change") ;;
        --config | --hostfile | --output_dir | --infra.output_dir | --resume | --resume_from | --resume_from_checkpoint | --profile)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            set -- "$1=$2" "${@:3}"; continue ;;
        *) words+=("$1") ;;
    esac
    shift
done

source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
config="${config:-$ROOT/ds_configs/qwen3_0.6b_ul2.yaml}"
if [ -z "$output" ]; then
    [ ${#resume[@]} = 0 ] || { echo "error: name the run to go on with: infra.output_dir=FOLDER" >&2; exit 2; }
    name=$(basename "$config")
    output="${OUTPUT_DIR:-$ROOT/output}/${name%.*}-$(date +%Y%m%d-%H%M%S)"
fi
words=("infra.output_dir=$output" ${words[@]+"${words[@]}"})
ds-encdec validate --config "$config" ${hostfile:+--hostfile "$hostfile"} "${words[@]}" # names every mistake

export WANDB_PROJECT="${WANDB_PROJECT:-qwen3-encoder-decoder}"
port="${MASTER_PORT:-$((20000 + RANDOM % 10000))}"

if [ -n "$hostfile" ]; then
    [ -f "$hostfile" ] || hostfile="$ROOT/hostfiles/$(basename "$hostfile")" # the name of a shipped one
    hosts=$(python -m ds_encdec.config.hostfile "$hostfile" | cut -d ' ' -f 1)
    launcher=(deepspeed --hostfile "$hostfile" --master_port "$port")
    case "$hosts" in
        *$'\n'*) # DeepSpeed itself forwards PYTHON*, NCCL*, UCX* and MLFLOW*
            mkdir -p "$output"
            (
                umask 077
                while IFS= read -r name; do
                    [[ $name =~ $SECRET || ${!name} =~ ://[^/]*:.*@ || ${!name} == *$'\n'* ]] || echo "$name=${!name}"
                done < <(compgen -e | grep -E "$FORWARDED")
                python -m ds_encdec.config.hostfile # what .deepspeed_env says: the later wins
            ) >"$output/deepspeed_env"
            while IFS= read -r name; do unset "$name"; done < <(compgen -e | grep -E "^(MLFLOW|UCX|PYTHON|NCCL).*$SECRET")
            DS_ENV_FILE=$(realpath "$output/deepspeed_env")
            export DS_ENV_FILE ;;
        localhost | 127.* | "$(hostname)" | "$(hostname -s)") # where no ssh is needed
            launcher+=(--no_ssh_check --master_addr 127.0.0.1) ;;
    esac
else
    planned=$(ds-encdec train --config "$config" --print-config "${words[@]}")
    ranks=$(sed -n 's/^ *num_gpus: *//p' <<<"$planned")
    launcher=(deepspeed --num_gpus "$ranks" --master_port "$port")
    case "$(sed -n 's/^ *distributed_type: *//p' <<<"$planned")" in
        fsdp | ddp) launcher=(torchrun --nproc-per-node "$ranks" --master-port "$port") ;;
    esac
fi

echo "the run's folder is $output"
exec "${launcher[@]}" "$ROOT/ds_encdec/train.py" --config "$config" "${words[@]}" ${resume[@]+"${resume[@]}"} ${options[@]+"${options[@]}"}
