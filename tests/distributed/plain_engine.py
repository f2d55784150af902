"""An engine added to a program that does not know it: plain torch on one rank, by a module and a row in `ENGINES`.

`train_and_go_on` needs a process of its own: it puts the row first, where `infra.distributed_type=auto` finds it.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch_oracle import TorchOracle

from ds_encdec.base.types import MOMENTS, SavedState, WeightSource
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.engine import select
from ds_encdec.engine.protocol import DCP_FOLDER, EngineRecord, StagedSave, write_record
from ds_encdec.launch.preemption import StopRequest
from ds_encdec.launch.world import discover
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.registry.engines import ENGINES, ByEngine, EngineName
from ds_encdec.training.build import run_training


class PlainEngine(TorchOracle):
    """The oracle, with what a run asks of an engine beside its steps. Its checkpoints are in the form `dcp`."""

    def __init__(
        self, config: FullConfig, context: Any, model_config: Qwen3Seq2SeqConfig, weights: WeightSource, _: int
    ) -> None:
        super().__init__(config, model_config, weights)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}

    def _state(self) -> dict[str, nn.Parameter]:
        tensors = {f"weight.{name}": parameter for parameter, name in self._names.items()}
        for kind in MOMENTS:
            tensors |= {f"{kind}.{name}": self.optimizer.state[p][kind] for p, name in self._names.items()}
        return tensors

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        tensors = {key: tensor.detach().clone() for key, tensor in self._state().items()}
        groups = tuple(tuple(self._names[p] for p in group["params"]) for group in self.optimizer.param_groups)
        record = EngineRecord("dcp", "zero0", world_size=1, applied_steps=self.applied_steps, groups=groups)

        def write() -> list[Path]:
            folder = directory / DCP_FOLDER
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
            return [*folder.glob("*.distcp"), folder / ".metadata", write_record(record, directory)]

        return StagedSave(sum(tensor.nbytes for tensor in tensors.values()), lambda: None, write)

    def load(self, saved: SavedState) -> None:
        raise NotImplementedError("this engine resumes nothing: others read what it has saved")

    def held_bytes(self) -> dict[str, int]:
        return {"weights": sum(parameter.nbytes for parameter in self._names)}

    def replica_digest(self) -> None:
        """One rank has no other."""


ROW: dict[str, Any] = {
    "name": "plain",
    "title": "plain torch",
    "distributed_types": ("plain",),
}
"""What its row says of its own; its checkpoints' form, its process group and its memory are those of FSDP2."""


def _of_plain(table: ByEngine[Any], engine: EngineName) -> Any:
    """What a table has for an engine; for this one its class, and else FSDP2's."""
    if engine not in ("deepspeed", "fsdp") and table is select.BUILDERS:
        return f"{__name__}:PlainEngine"
    return getattr(table, "fsdp" if engine not in ("deepspeed", "fsdp") else engine)


def train_and_go_on(config: str, settings: Sequence[str]) -> None:
    """Train 4 steps under the engine that the row adds, and 2 more under FSDP2 from its checkpoint."""
    ByEngine.__getitem__ = _of_plain  # type: ignore[method-assign]
    others = dict(ENGINES)
    ENGINES.clear()
    ENGINES.update({"plain": dataclasses.replace(others["fsdp"], **ROW), **others})
    short = ["infra.distributed_type=auto", "training.num_train_steps=4"]
    long = ["infra.distributed_type=fsdp", "training.num_train_steps=6"]
    for engine, resume in ((short, None), (long, "auto")):
        with StopRequest(discover(os.environ)) as stop:
            run_training(load_config(Path(config), [*settings, *engine]), stop, resume=resume)
