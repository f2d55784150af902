"""`ds-encdec convert`: a checkpoint in the files of a certain engine, for tools that read those.

Runs resume from any checkpoint as it is; nothing has to be converted for that. Here the engine is built on the CPU,
loads the checkpoint and saves itself, so that its files are what it writes in training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from ds_encdec.checkpoint.folder import refuse_existing, written_shards, written_whole
from ds_encdec.checkpoint.manifest import read_manifest, seal, verify_checkpoint
from ds_encdec.checkpoint.saved_state import open_saved_state
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.engines import STATE_FORMATS, EngineSpec
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.types import ConfigError

_TIMEOUT = timedelta(hours=2)
"""How long ranks wait for each other at most, which is mostly while rank 0 hashes the checkpoint."""


def convert_checkpoint(checkpoint: Path, out: Path, *, to: str, overrides: Sequence[str] = ()) -> None:
    """Write `checkpoint` to the new checkpoint folder `out` in the format `to`, a key of `engines.STATE_FORMATS`.

    Called by one process, or by N ranks, which write N shards. Weights, moments and counters are equal to the bit. What
    else a checkpoint holds is copied, with the engine and `overrides` (`section.field=value`) in config.yaml; of these
    `infra.sharding_stage` says how the state is cut. Raises CheckpointError for a damaged checkpoint and where `out`
    exists, and ConfigError where the configuration asks for what the engine cannot do.
    """
    source, world, row = checkpoint.expanduser().resolve(), discover(os.environ), STATE_FORMATS[to]
    refuse_existing(out)
    step = read_manifest(source).step  # what is no checkpoint is called that
    config = load_config(source / "config.yaml", [f"infra.distributed_type={row.name}", *overrides])
    if resolve_engine(config) != row.name:
        raise ConfigError(
            f"infra.distributed_type={config.infra.distributed_type} is not the engine that --to asks for"
        )
    device = choose_device("cpu", world)
    init_process_group(world, device, _TIMEOUT, row.name)
    collectives = HostCollectives(_TIMEOUT)
    collectives.on_rank_zero(lambda: verify_checkpoint(source))
    with written_whole(out, collectives) as (unfinished, writing):
        saved = collectives.on_every_rank(lambda: open_saved_state(source, verified=True))
        model_config = Qwen3Seq2SeqConfig.from_pretrained(source / "model")
        written_as = _writing_config(config, row, world.world_size)
        engine = create_engine(written_as, RunContext(world, device, row.name, collectives), model_config, None, 1)
        engine.load(saved)

        @writing.refusals_told()
        def write_rest() -> None:
            for name in ("trainer.json", "data.json"):
                shutil.copyfile(source / name, unfinished / name)
            shutil.copytree(source / "model", unfinished / "model")
            config.to_yaml(unfinished / "config.yaml")
            seal(unfinished, step=step, world_size=world.world_size, engine=row.name, engine_files=records)

        records = written_shards(engine.stage(unfinished, copy=False), unfinished, writing, collectives)
        engine.close()
        collectives.on_rank_zero(write_rest)
    shutdown()


def _writing_config(config: FullConfig, row: EngineSpec, ranks: int) -> FullConfig:
    """`config` as an engine takes it here: float32 on the CPU, nothing that only training needs.

    Stages keep what they shard, but not over whom.
    """
    stage = config.infra.sharding_stage.removesuffix("_hybrid")
    training = {
        "bf16": False,
        "fp16": False,
        "torch_adam": True,
        "activation_checkpointing": "none",
        "torch_compile": False,
    }
    infra = {
        "distributed_type": config.infra.distributed_type,
        "num_gpus": ranks,
        "device": "cpu",
        "sharding_stage": row.converted_as.get(stage, stage),
        "offload_optimizer": "none",
    }
    return FullConfig.model_validate(
        {**config.model_dump(), "training": config.training.model_dump() | training, "infra": infra}
    )
