"""One process that trains under both engines: each run, and a refused start, leaves the libraries as it found them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = """
infra.num_gpus=1 infra.device=cpu data.num_lanes=1 data.max_seq_length=64 training.num_train_steps=2
data.max_encoder_length=32 data.max_decoder_length=32 training.per_device_train_batch_size=1
training.eval_samples=2 training.eval_steps=2 training.save_steps=2 training.warmup_steps=1
training.bf16=false training.activation_checkpointing=none training.report_to=none
"""
RUNS = (
    ("infra.sharding_stage=zero3", "infra.offload_optimizer=cpu"),
    ("infra.sharding_stage=zero2", "infra.offload_optimizer=none"),
    ("infra.distributed_type=fsdp", "infra.offload_optimizer=none"),
)

PROGRAM = """
import json, logging, os, sys, types
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, torch, torch._dynamo, torch._inductor.config
import ds_encdec.engine.deepspeed.zero, ds_encdec.engine.fsdp2, ds_encdec.model.lora
from deepspeed.runtime.zero import partition_parameters, stage3
from ds_encdec import load_config, run_training
from ds_encdec.base.foreign_places import _layers
from ds_encdec.base.types import OutputLockedError
del os.environ["DS_ACCELERATOR"]

MODULES = (torch, torch.nn, torch.nn.functional, torch.distributed, partition_parameters, stage3)

def state():
    found = {"environ": dict(os.environ), "threads": torch.get_num_threads()}
    for module in MODULES:
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
                found[f"{module.__name__}.{name}"] = id(value)
            if isinstance(value, type) and value.__module__.startswith(("torch.nn", "deepspeed")):
                methods = {key: id(one) for key, one in vars(value).items() if callable(one)}
                found |= {f"{module.__name__}.{name}.{key}": one for key, one in methods.items()}
    for config in (torch._dynamo.config, torch._inductor.config):
        found |= {f"{config.__name__}.{name}": repr(value) for name, value in config.get_config_copy().items()}
    for name in ("bitsandbytes.backends.cpu.ops", "transformers", "datasets", "torch"):
        found[f"filters of {name}"] = len(logging.getLogger(name).filters)
    return found

changed = []
for settings in json.loads(sys.argv[1]):
    before = state()
    run_training(load_config("ds_configs/quickstart.yaml", settings))
    after = state()
    # DeepSpeed leaves names of its own behind in torch's classes; nothing that was there is another.
    changed.append({name: [before[name], after.get(name)] for name in before if before[name] != after.get(name)})
before = dict(os.environ)
try:
    run_training(load_config("ds_configs/quickstart.yaml", settings))
except OutputLockedError:  # the folder holds a run by now
    changed.append({name: value for name, value in os.environ.items() if before.get(name) != value})
changed.append(len(_layers))
print(json.dumps(changed))
"""


@pytest.mark.launch
def test_a_run_leaves_its_libraries_as_it_found_them(tmp_path: Path) -> None:
    runs = [[*SETTINGS.split(), *run, f"infra.output_dir={tmp_path}/{number}"] for number, run in enumerate(RUNS)]
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    # The allocator reads its setting once in a process: a run that sets it does so for good.
    given = {"PYTHONPATH": str(ROOT), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(runs)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in launched} | given,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [{}, {}, {}, {}, 0]
