#!/usr/bin/env bash
# Trains a small encoder-decoder on text that is already on this machine, exports it, and shows what it has learned.
#
#   scripts/quickstart.sh [--sft | --dpo | --embeddings | --distill] [--ranks N] [--resume auto] [section.field=value ...]
#   scripts/quickstart.sh infra.distributed_type=fsdp       # FSDP2 instead of DeepSpeed, started by torchrun
#
# --sft    learns a task instead, from inputs and outputs, and counts the right outputs of a held-out split
# --dpo    learns from pairs of answers which one is right, and counts the held-out pairs in the right order
# --distill  learns to continue text, beside a small decoder that is trained first (minutes, once)
# --embeddings  learns to find the function that a docstring describes, and compares that with searches by words
# --ranks  processes to train with (default: two, or one where there is only one core or GPU)
#
# Each call starts a fresh run in output/quickstart (with --sft quickstart_sft, and so on), output/quickstart-2, ... of the
# repository, unless infra.output_dir=FOLDER says where. With --resume the newest of them is continued.
set -euo pipefail

name=quickstart ranks="" resume="" output="" overrides=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        --sft | --dpo | --embeddings) name=quickstart_${1#--}; shift ;;
        --distill) name=quickstart_distillation; shift ;;
        --ranks=*) ranks="${1#*=}"; shift ;;
        --resume=*) resume="${1#*=}"; shift ;;
        infra.output_dir=* | --infra.output_dir=* | output_dir=* | --output_dir=*)
            output="${1#*=}" output="${output/#\~\//$HOME/}"; shift ;;
        --*=*) overrides+=("$1"); shift ;;
        --ranks | --resume | --*.* | --output_dir)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            set -- "$1=$2" "${@:3}" ;;
        *) overrides+=("$1"); shift ;;
    esac
done
case "$ranks" in *[!0-9]* | 0) echo "error: --ranks $ranks: give a number of processes, at least 1" >&2; exit 2 ;; esac

echo "an environment (once), some hundred steps of training, a look at the result: about 4 minutes on two cores" >&2
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

numbered_folder() { # the first folder that is not there yet, or with --resume the last one that is
    local folder="$ROOT/output/$name" next="$ROOT/output/$name" number=1
    while [ -e "$next" ]; do
        folder="$next" number=$((number + 1)) next="$ROOT/output/$name-$number"
    done
    if [ -n "$resume" ]; then echo "$folder"; else echo "$next"; fi
}

read -r gpus cores <<<"$(python -c 'import os, torch; print(torch.cuda.device_count(), len(os.sched_getaffinity(0)))')"
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=cpu # DeepSpeed looks for one otherwise, and warns
[ -n "$ranks" ] || ranks=$((gpus + cores > 1 && gpus != 1 ? 2 : 1)) # at most two: the run is small
output="${output:-$(numbered_folder)}"
# One port per run, so that another one on this machine is not in the way.
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

if [ "$name" = quickstart_distillation ]; then
    decoder="$ROOT/output/decoder"
    python "$ROOT/scripts/bench/distillation.py" decoder --folder "$decoder"
    overrides=("model.model_name_or_path=$decoder/source" "data.data_files=$decoder/text/ul2.jsonl"
        "data.eval_files=$decoder/text/eval.jsonl" ${overrides[@]+"${overrides[@]}"})
fi
launcher=(deepspeed --log_level error --num_gpus "$ranks" --master_port "$port")
engine=$(ds-encdec train --config "$ROOT/ds_configs/$name.yaml" --print-config ${overrides[@]+"${overrides[@]}"} |
    sed -n 's/^ *distributed_type: *//p') # in whatever words it was asked for
case "$engine" in fsdp | ddp)
    launcher=(torchrun --nproc-per-node "$ranks" --master-port "$port")
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" ;; # which torchrun would set, with a warning
esac

echo "training on $ranks rank(s) into $output"
"${launcher[@]}" "$ROOT/ds_encdec/train.py" \
    --config "$ROOT/ds_configs/$name.yaml" ${resume:+--resume "$resume"} \
    "infra.output_dir=$output" ${overrides[@]+"${overrides[@]}"}

model="$output/export/final" # which the run has left itself, unless it was told not to
[ -e "$model" ] || ds-encdec export "$output/checkpoints/final" "$model"

echo
echo "evaluating ..."
if [ "$name" = quickstart_sft ]; then
    [ -z "$resume" ] || rm -rf "$model-test" # of the model that was there before
    ds-encdec evaluate --model "$model" --split test --max-samples 200 --max-new-tokens 24 --metrics exact_match
    echo "rows         $model-test/predictions.jsonl"
elif [ "$name" = quickstart ]; then
    [ -z "$resume" ] || rm -rf "$model-validation"
    ds-encdec evaluate -q --model "$model" --split validation --max-new-tokens 0 >/dev/null || true # it has said why
fi
python - "$output/metrics.jsonl" "$model-validation/metrics.json" "$output/reference/table.npy" <<'END'
import json, os, sys

lines = [json.loads(line) for line in open(sys.argv[1])]
train, held_out = ([line for line in lines if f"{name}/loss" in line] for name in ("train", "eval"))
kinds = [key.removeprefix("eval/loss") for key in held_out[-1] if key.startswith("eval/loss")] if held_out else [""]
rows = [("the first steps", train[0], "train"), *(("held out, at the end", line, "eval") for line in held_out[-1:])]
prefers = any("eval/reward_accuracy" in line for line in lines)
per = "loss of a pair" if prefers else "loss of a query" if any("eval/mrr" in line for line in lines) else "loss, nats per token"
print(f"{per:24}" + "".join(f"{kind.strip('_') or 'all':>7}" for kind in kinds))
for title, line, name in rows:
    losses = [line.get(f"{name}/loss{kind}") for kind in kinds]  # a short interval may be without a denoiser
    print(f"  {title:22}" + "".join(f"{'-':>7}" if loss is None else f"{loss:7.2f}" for loss in losses))
if os.path.exists(sys.argv[2]):
    figures = json.load(open(sys.argv[2]))["figures"]
    print("masked tokens of held-out text: {token_accuracy:.1f} % right".format(**figures))
if prefers:
    import numpy as np

    before = np.load(sys.argv[3])["log_probs"]  # of all pairs, by the model that the run began with
    print(f"pairs whose right answer is the likelier one, before training: {100 * (before[:, 0] > before[:, 1]).mean():.1f} %")
    print(f"held-out pairs whose right answer has gained more, at the end: {100 * held_out[-1]['eval/reward_accuracy']:.1f} %")
END
loads="AutoModelForSeq2SeqLM.from_pretrained"
if [ "$name" = quickstart_embeddings ]; then
    loads=SentenceTransformer
    python "$ROOT/scripts/dev/embedding_quickstart.py" "$output"
fi
if [ "$name" = quickstart ]; then
    text=$(ds-encdec generate --model "$model" --text "The return value is a" --max-new-tokens 32 \
        --repetition-penalty 1.3 2>/dev/null)
    echo "what it writes: $(tr -s '[:space:]' ' ' <<<"$text")"
    echo "(so small a model learns which words are likely where; one task it learns well: scripts/quickstart.sh --sft)"
fi
echo
ds-encdec report "$output"
cat <<END

metrics      $output/metrics.jsonl
TensorBoard  tensorboard --logdir $output/logs
checkpoints  $output/checkpoints
model        $model   ($loads(..., trust_remote_code=True))
try next     source ${VIRTUAL_ENV:-$ROOT/.venv}/bin/activate && ds-encdec inspect-data $ROOT/ds_configs/$name.yaml -n 3
took         $((SECONDS / 60)) min $((SECONDS % 60)) s
END
