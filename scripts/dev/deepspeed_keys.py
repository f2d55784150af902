"""Writes ds_encdec/config/yaml/deepspeed_keys.json from DeepSpeed's own pydantic classes; --check only compares.

The file lets a DeepSpeed JSON be checked without importing DeepSpeed. Run this when the pinned DeepSpeed changes; what
becomes of a new key is decided in ds_encdec/config/yaml/deepspeed_keys.yaml.
"""

from __future__ import annotations

import argparse
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any, get_args

SNAPSHOT = Path(__file__).resolve().parents[2] / "ds_encdec" / "config" / "yaml" / "deepspeed_keys.json"
KINDS = (bool, int, float, list, str)  # bool is an int, so it comes first


def snapshot() -> dict[str, Any]:
    """`blocks`: the keys of each block that DeepSpeed has a class for, with the kinds of their values.

    `removed`: the keys that it refuses, since it no longer has them.
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "compile": CompileConfig,
    }
    blocks = {
        block: {
            key: kind(field.annotation)
            for name, field in model.model_fields.items()
            if f"{block}.{(key := field.alias or name)}" not in models
        }
        for block, model in models.items()
    }
    removed = [*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)]
    return {"blocks": blocks, "removed": removed}


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
