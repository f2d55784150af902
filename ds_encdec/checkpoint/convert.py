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
from typing import Literal

from ds_encdec.checkpoint.manifest import FileRecord, read_manifest, record_file, seal, verify_checkpoint
from ds_encdec.checkpoint.saved_state import open_saved_state
from ds_encdec.checkpoint.whole_folder import refuse_existing, written_whole
from ds_encdec.config.load import load_config
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.engines import EngineName
from ds_encdec.launch.context import RunContext
from ds_encdec.launch.disk import Writing
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import World, discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.types import ConfigError, SavedState

Format = Literal["deepspeed", "dcp"]

_ENGINES: dict[Format, EngineName] = {"deepspeed": "deepspeed", "dcp": "fsdp"}
_TIMEOUT = timedelta(hours=2)
"""Of the ranks' waiting for each other, most of it while rank 0 hashes the checkpoint."""


def convert_checkpoint(checkpoint: Path, out: Path, *, to: Format, overrides: Sequence[str] = ()) -> None:
    """Write `checkpoint` to the new checkpoint folder `out` in the format `to`.

    Called by one process, or by N ranks, which write N shards. Weights, moments and counters are equal to the bit. What
    else a checkpoint holds is copied, with the engine and `overrides` (`section.field=value`) in config.yaml; of these
    `infra.sharding_stage` says how the state is cut. Raises CheckpointError for a damaged checkpoint and where `out`
    exists, and ConfigError where the configuration asks for what the engine cannot do.
    """
    source, world = checkpoint.expanduser().resolve(), discover(os.environ)
    refuse_existing(out)
    config = _target_config(source, _ENGINES[to], overrides)
    init_process_group(world, choose_device("cpu", world), _TIMEOUT, _ENGINES[to])
    collectives = HostCollectives(_TIMEOUT)
    collectives.on_rank_zero(lambda: verify_checkpoint(source))
    with written_whole(out, collectives) as (unfinished, writing):
        saved = collectives.on_every_rank(lambda: open_saved_state(source, verified=True))
        own = _write_engine_files(saved, source, unfinished, config, world, collectives, writing)
        records = [record for rank_records in collectives.gather(own) for record in rank_records]

        def write_rest() -> None:
            with writing.refusals_told():
                _write_rest(source, unfinished, config)
                step = read_manifest(source).step
                seal(unfinished, step=step, world_size=world.world_size, engine=_ENGINES[to], engine_files=records)

        collectives.on_rank_zero(write_rest)
    shutdown()


def _target_config(source: Path, engine: EngineName, overrides: Sequence[str]) -> FullConfig:
    """The checkpoint's configuration, for `engine`. Raises CheckpointError, or ConfigError that says what to set."""
    read_manifest(source)  # what is no checkpoint is called that
    config = load_config(source / "config.yaml", [f"infra.distributed_type={engine}", *overrides])
    if resolve_engine(config) != engine:
        raise ConfigError(
            f"infra.distributed_type={config.infra.distributed_type} is not the engine that --to asks for"
        )
    return config


def _writing_config(config: FullConfig, world: World) -> FullConfig:
    """`config` as an engine takes it here: float32 on the CPU, nothing that only training needs.

    Stages keep what they shard, but not over whom; DeepSpeed's zero0 becomes zero1, which has a zero_to_fp32.py.
    """
    stage = config.infra.sharding_stage.removesuffix("_hybrid")
    if (config.infra.distributed_type, stage) == ("deepspeed", "zero0"):
        stage = "zero1"
    training = {
        "bf16": False,
        "fp16": False,
        "torch_adam": True,
        "activation_checkpointing": "none",
        "torch_compile": False,
    }
    infra = {
        "distributed_type": config.infra.distributed_type,
        "num_gpus": world.world_size,
        "device": "cpu",
        "sharding_stage": stage,
        "offload_optimizer": "none",
    }
    return FullConfig.model_validate(
        {**config.model_dump(), "training": config.training.model_dump() | training, "infra": infra}
    )


def _write_engine_files(
    saved: SavedState,
    source: Path,
    unfinished: Path,
    config: FullConfig,
    world: World,
    collectives: HostCollectives,
    writing: Writing,
) -> list[FileRecord]:
    """Load `saved` into the engine and write that; returns this rank's files. Collective."""
    model_config = Qwen3Seq2SeqConfig.from_pretrained(source / "model")
    device, written_as = choose_device("cpu", world), _writing_config(config, world)
    context = RunContext(world, device, resolve_engine(config), collectives)
    engine = create_engine(written_as, context, model_config, None, 1)
    engine.load(saved)
    staged = engine.stage(unfinished, copy=False)
    needed = sum(collectives.gather(staged.num_bytes))

    def write() -> list[FileRecord]:
        with writing.refusals_told():
            return [record_file(path, unfinished) for path in staged.write()]

    collectives.on_every_rank(lambda: writing.require_space(needed))
    files = collectives.on_every_rank(write)
    engine.close()
    return files


def _write_rest(source: Path, unfinished: Path, config: FullConfig) -> None:
    for name in ("trainer.json", "data.json"):
        shutil.copyfile(source / name, unfinished / name)
    shutil.copytree(source / "model", unfinished / "model")
    config.to_yaml(unfinished / "config.yaml")
