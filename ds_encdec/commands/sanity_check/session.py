"""Run a few minutes of checks in one process, before a long run on many (`ds-encdec sanity-check`)."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_encdec.base.findings import Finding
from ds_encdec.base.types import ConfigError, DsEncDecError, GateError, OutOfMemoryError
from ds_encdec.commands.sanity_check.checks import CHECKS, Check, Subject
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.shares import with_assumed_batch_size
from ds_encdec.config.stored_model import read_stored_model
from ds_encdec.engine.select import join_ranks
from ds_encdec.launch.memory_errors import is_out_of_memory
from ds_encdec.launch.process_group import shutdown
from ds_encdec.launch.world import discover
from ds_encdec.monitor.metrics_file import strict_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SanityReport:
    """All checks, and the error that the process fails with: None if all have passed, else a GateError, or the error of
    a check with its own exit code (configuration 2, data 4, model or checkpoint 5, memory 6)."""

    checks: tuple[Finding, ...]
    error: DsEncDecError | None

    def as_json(self) -> str:
        """Return one object of strict JSON (see `strict_json`): whether all passed, and the list of checks."""
        others = ("passed", "skipped", "message", "values")
        checks = [{"name": check.check, **{name: getattr(check, name) for name in others}} for check in self.checks]
        return json.dumps(strict_json({"passed": self.error is None, "checks": checks}), indent=2, allow_nan=False)


def check_config(
    config: FullConfig, report: Callable[[Finding], None] = lambda finding: None, *, checks: Sequence[Check] = CHECKS
) -> SanityReport:
    """Run `checks` on a configuration in this process alone; `report` is called with each finding. It leaves nothing
    behind, and `infra.output_dir` as it is. Raises ConfigError if this machine cannot run it at all."""
    world = discover(os.environ)
    if world.world_size > 1:
        raise ConfigError("ds-encdec sanity-check is one process: start it without deepspeed or torchrun")
    config = on_one_rank(config)
    subject = Subject(config, join_ranks(config, world))
    results: dict[str, Finding] = {}
    errors: list[DsEncDecError] = []
    subject.opened.callback(shutdown)
    with subject.opened:
        for check in checks:
            missing = [name for name in check.needs if name not in results or not results[name].passed]
            try:
                skipped = f"skipped, because {' and '.join(missing)} did not pass"
                result = Finding(check.name, False, skipped, skipped=True) if missing else check.look(subject)
            except Exception as error:
                logger.debug("%s:", check.name, exc_info=True)
                result = Finding(check.name, False, f"{type(error).__name__}: {error}")
                if is_out_of_memory(error):
                    errors.append(OutOfMemoryError(result.message))
                elif isinstance(error, DsEncDecError) and error.exit_code != DsEncDecError.exit_code:
                    errors.append(error)
            results[check.name] = result
            report(result)
    failed = [result.check for result in results.values() if not (result.passed or result.skipped)]
    gate = GateError(f"the sanity check is not passed: {', '.join(failed)}") if failed else None
    return SanityReport(tuple(results.values()), errors[0] if errors else gate)


def config_for_model(
    model: Path, config: Path | None, overrides: Sequence[str], deepspeed_config: Path | None = None
) -> FullConfig:
    """Return the configuration to check the model folder `model` with: `config`, else a small one on the built-in text.
    `overrides` come last. Raises ConfigError, and CheckpointError for a folder that is not a model's."""
    stored = read_stored_model(model / "config.json")
    settings: dict[str, Any] = {
        "model.model_name_or_path": json.dumps(str(model)),
        "model.tokenizer_name_or_path": "null",
        "model.architecture": "null",
    }
    if sentinels := stored.get("sentinel_token_ids"):
        settings |= {"model.num_sentinel_tokens": len(sentinels)}
        settings |= {"data.use_mode_tokens": json.dumps(bool(stored.get("mode_token_ids")))}
    if config is None:
        settings |= {
            "data.dataset_name": "builtin",
            "data.max_seq_length": 512,
            "data.max_encoder_length": 256,
            "data.max_decoder_length": 256,
            "training.per_device_train_batch_size": 2,
            "training.report_to": "none",
            "infra.distributed_type": "auto",
            "infra.device": "auto",
            "infra.num_gpus": 1,
            "infra.sharding_stage": "zero2",
            "infra.offload_optimizer": "none",
        }
    return load_config(config, [*(f"{name}={value}" for name, value in settings.items()), *overrides], deepspeed_config)


def on_one_rank(config: FullConfig) -> FullConfig:
    """Return `config` for a check in one process: steps of one micro-batch, all at the same learning rate."""
    fields = with_assumed_batch_size(config, config.infra.num_gpus).model_dump()
    fields["data"]["num_lanes"] = 1
    fields["training"] |= {
        "global_batch_size": None,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "warmup_ratio": None,
        "num_train_epochs": None,
    }
    if config.training.activation_checkpointing == "auto":
        fields["training"]["activation_checkpointing"] = "full"  # fits wherever the run's own choice fits
    fields["infra"] |= {"num_gpus": 1, "hybrid_shard_size": None}
    fields["infra"]["deepspeed_extra"].pop("scheduler", None)
    return FullConfig.model_validate(fields)
