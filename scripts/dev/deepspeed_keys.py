"""Writes ds_encdec/config/yaml/deepspeed_keys.json from DeepSpeed's own pydantic classes; --check only compares.

The file lets a DeepSpeed JSON be checked without importing DeepSpeed. Run this when the pinned DeepSpeed changes; what
becomes of a new key is decided in ds_encdec/config/yaml/deepspeed_keys.yaml.
"""

from __future__ import annotations

import argparse
import json
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

SNAPSHOT = Path(__file__).resolve().parents[2] / "ds_encdec" / "config" / "yaml" / "deepspeed_keys.json"
ZERO = "runtime.zero"
CLASSES = (
    ("bf16", "runtime.precision_config", "DeepSpeedBF16Config"),
    ("fp16", "runtime.precision_config", "DeepSpeedFP16Config"),
    ("zero_optimization", f"{ZERO}.config", "DeepSpeedZeroConfig"),
    ("zero_optimization.leaf_module", f"{ZERO}.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    ("zero_optimization.offload_param", f"{ZERO}.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    ("zero_optimization.offload_optimizer", f"{ZERO}.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
    ("comms_logger", "comm.config", "CommsLoggerConfig"),
    ("timers.throughput", "utils.config", "DeepSpeedThroughputTimerConfig"),
    ("tensorboard", "monitor.config", "TensorBoardConfig"),
    ("wandb", "monitor.config", "WandbConfig"),
    ("csv_monitor", "monitor.config", "CSVConfig"),
    ("comet", "monitor.config", "CometConfig"),
    ("compile", "compile.config", "CompileConfig"),
)
"""Block, and module and name of its class in DeepSpeed."""
KINDS = (bool, int, float, list, str)  # bool is an int, so it comes first


def snapshot() -> dict[str, Any]:
    """`blocks`: the keys of each block that DeepSpeed has a class for, with the kinds of their values.

    `removed`: the keys that it refuses, since it no longer has them.
    """
    config = import_module("deepspeed.runtime.config")
    models = {block: getattr(import_module(f"deepspeed.{module}"), name) for block, module, name in CLASSES}
    blocks = {
        block: {
            key: kind(field.annotation)
            for name, field in model.model_fields.items()
            if f"{block}.{(key := field.alias or name)}" not in models
        }
        for block, model in models.items()
    }
    in_zero = (f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS)
    return {"blocks": blocks, "removed": [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, *in_zero]}


def kind(annotation: Any) -> str:
    """The name of a plain type in `annotation`; an enumeration is a string, as JSON has it."""
    parts = [annotation, *get_args(annotation)]
    types = [getattr(part, "__origin__", part) for part in parts]
    found = next((known for known in KINDS for part in types if part is known), None)
    is_enum = any(isinstance(part, type) and issubclass(part, Enum) for part in types)
    return found.__name__ if found and not is_enum else "str" if is_enum else "other"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    text = json.dumps(snapshot(), indent=1) + "\n"
    if not parser.parse_args().check:
        SNAPSHOT.write_text(text)
    elif not SNAPSHOT.exists() or SNAPSHOT.read_text() != text:
        print(f"{SNAPSHOT} is not of the installed DeepSpeed: run python {sys.argv[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
