#!/usr/bin/env bash
# Builds the wheel, installs it outside of the repository, and trains with it from there under both launchers.
#
# What it depends on is the environment's (scripts/venv.sh), so nothing is downloaded a second time.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../venv.sh"

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
mkdir "$elsewhere/source" "$elsewhere/work"
git -C "$ROOT" ls-files -z | (cd "$ROOT" && xargs -0 tar c) | tar x -C "$elsewhere/source" # a build leaves folders behind
python -m pip wheel --quiet --no-deps --wheel-dir "$elsewhere" "$elsewhere/source"
python -m pip install --quiet --no-deps --target "$elsewhere/site" "$elsewhere"/*.whl
cd "$elsewhere/work"
export PYTHONPATH="$elsewhere/site" PATH="$elsewhere/site/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "files: all of the repository's package are in the wheel"
python - "$elsewhere" <<'END_PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import ds_encdec

elsewhere = Path(sys.argv[1])
assert Path(ds_encdec.__file__).is_relative_to(elsewhere / "site"), ds_encdec.__file__
assert ds_encdec.__version__ == version("ds_encdec") != "0+unknown"
package = elsewhere / "source" / "ds_encdec"
files = [*package.rglob("*"), *(package / "ds_configs").iterdir(), *(package / "hostfiles").iterdir()]
names = {file.relative_to(package) for file in files if file.is_file()}
missing = sorted(map(str, (name for name in names if not (elsewhere / "site" / "ds_encdec" / name).is_file())))
assert not missing, f"the wheel is without {missing}"
END_PYTHON

echo "configurations: found by name, and written to be edited"
ds-encdec --version
ds-encdec validate quickstart
ds-encdec validate ds_configs/qwen3_0.6b_ul2.yaml --deepspeed_config zero2
ds-encdec init quickstart --out mine.yaml
ds-encdec init localhost_cpu --out hostfile

small=(training.num_train_steps=4 training.warmup_steps=1 training.save_steps=2 training.eval_steps=2 training.eval_samples=8)
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
echo "trains: DeepSpeed, two ranks of a host file, and goes on under torchrun as FSDP2"
deepspeed --log_level error --hostfile hostfile --no_ssh_check --master_addr 127.0.0.1 --master_port "$port" \
    --module ds_encdec.train -q --config mine.yaml "${small[@]}" infra.output_dir=run
torchrun --nproc-per-node 2 --master-port "$port" -m ds_encdec.train -q --config quickstart "${small[@]}" \
    training.num_train_steps=6 infra.distributed_type=fsdp infra.output_dir=further --resume run/checkpoints/final
ds-encdec verify further
ds-encdec report further
ds-encdec generate --model further/export/final --raw --max-new-tokens 4 --text "a <extra_id_0> of text" >/dev/null
echo "the wheel is whole: it was installed elsewhere, trained, resumed and exported"
