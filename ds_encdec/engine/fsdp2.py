"""The FSDP2 engine: sharded, hybrid and plain data parallel training in torch alone, behind `protocol.Engine`.

One class for all stages; what is sharded over whom is a mesh (fsdp_sharding.py). Parameters are float32 and are the
master weights; layers compute in bfloat16 or float32, gradients are reduced and accumulated in float32.

Averaging. FSDP2 averages gradients over all ranks, so the loss, a *sum* over tokens, is multiplied by world size /
target tokens of the whole step. Between the micro-batches of a step nothing is communicated unless
`infra.fsdp_reduce_every_micro_batch` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.engine.forward import backward_seed, packed_forward
from ds_encdec.engine.fsdp_sharding import (
    build_sharded_model,
    fill,
    make_mesh,
    reshard,
    reshards_after_forward,
    sharded_parameters,
)
from ds_encdec.engine.fsdp_state import HostCopies, StateWriter, keys_to_write, load_state, state_tensors
from ds_encdec.engine.held_bytes import held_bytes
from ds_encdec.engine.protocol import StagedSave, Veto
from ds_encdec.engine.record import EngineRecord
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.world import World
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.optim.param_groups import parameter_groups
from ds_encdec.optim.schedules import learning_rate
from ds_encdec.types import Batch, LossSum, SavedState, StepResult, WeightSource


class FSDP2Engine:
    """`protocol.Engine` on `fully_shard`. Every method is collective: all ranks, same order."""

    def __init__(
        self,
        config: FullConfig,
        world: World,
        device: torch.device,
        model_config: Qwen3Seq2SeqConfig,
        weights: WeightSource | None,
    ) -> None:
        """Build the model, sharded from the start; every rank reads its own rows of `weights`.

        Without `weights` the parameters hold anything until `load`. The process group exists. Raises ConfigError for
        a hybrid that does not divide the ranks, and what any rank's `weights` raise, on all ranks.
        """
        self.device = device
        self._training, self._infra = config.training, config.infra
        mesh = make_mesh(config.infra, world, device)
        timeout = timedelta(minutes=config.infra.distributed_timeout_minutes)
        self._collectives = HostCollectives(timeout)
        self._writer = StateWriter(timeout)
        model = build_sharded_model(config, model_config, mesh, device)
        assert isinstance(model, FSDPModule)
        self.model: torch.nn.Module = model
        self._sharded: FSDPModule = model
        self._parameters = sharded_parameters(model)
        if weights is not None:
            fill(self._parameters, weights, self._collectives)
        self.optimizer = _adamw(model, config.training)
        self._host_copies = HostCopies(pin_memory=config.infra.pin_memory and device.type == "cuda")
        self._loss_scaler: Mapping[str, float | int] | None = None
        self._applied_steps = 0
        model.train()

    def forward(self, batch: Batch) -> LossSum:
        """See protocol.Engine."""
        return packed_forward(self.model, batch.to(self.device))

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        """See protocol.Engine. A step without any target has a zero gradient."""
        self._sharded.set_requires_gradient_sync(last or self._infra.fsdp_reduce_every_micro_batch)
        self._sharded.set_requires_all_reduce(last)  # between replicas once per step in any case
        self._sharded.set_reshard_after_backward(last or reshards_after_forward(self._infra))
        backward_seed(loss_sum, dist.get_world_size() / max(target_tokens, 1)).backward()

    def step(self, veto: Veto | None = None) -> StepResult:
        """See protocol.Engine. A step with a non-finite norm is skipped, and its norm is inf."""
        rate = learning_rate(self._applied_steps, self._training)
        norm = self._gradient_norm()
        finite = bool(torch.isfinite(norm))  # the one device synchronisation of a step
        applied = finite and not (veto is not None and veto(norm))
        if applied:
            if self._training.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._training.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._applied_steps += 1
        self.optimizer.zero_grad()
        return StepResult(applied, norm if finite else torch.full_like(norm, torch.inf), rate)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """See protocol.Engine."""
        self.model.eval()
        try:
            return self.forward(batch)
        finally:
            self.model.train()

    def stage(self, directory: Path, *, copy: bool) -> StagedSave:
        """See protocol.Engine. torch.distributed.checkpoint's files, see fsdp_state."""
        tensors = state_tensors(self._parameters, self.optimizer)
        keys = keys_to_write(tensors)
        # DCP keeps what it has fetched from a GPU until its file is closed: a second copy beside the one that is held.
        if copy or self._host_copies.exist:
            copied = {key: tensors[key] for key in keys}
            # Host memory may run out on one rank alone.
            tensors |= self._collectives.on_every_rank(lambda: self._host_copies.take(copied))
        return self._writer.staged(tensors, keys, self._record(), directory)

    def load(self, saved: SavedState) -> None:
        """See protocol.Engine."""
        load_state(saved, self._parameters, self.optimizer, self._collectives)
        reshard(self.model)  # what an evaluation has left gathered is the old state
        self._applied_steps = saved.applied_steps
        self._loss_scaler = saved.loss_scaler

    def held_bytes(self) -> dict[str, int]:
        """See protocol.Engine. The shards are the master weights; weights are what is gathered of them now."""
        shards = list(self._parameters.values())
        return held_bytes(
            self.device,
            {
                "master_weights": shards,
                "weights": self.model.parameters(),
                "gradients": [parameter.grad for parameter in shards],
                "optimizer": self.optimizer.state,
            },
        )

    def close(self) -> None:
        """See protocol.Engine. Afterwards drop the last reference to the engine."""
        self.optimizer.zero_grad()
        self._writer.close()
        del self.model, self._sharded, self._parameters, self.optimizer, self._host_copies

    def _gradient_norm(self) -> Tensor:
        """Global L2 norm of the step's gradients: float32 scalar on the device, equal on all ranks."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole.to(self.device)

    def _record(self) -> EngineRecord:
        names = {parameter: name for name, parameter in self._parameters.items()}
        return EngineRecord(
            format="dcp",
            sharding_stage=self._infra.sharding_stage,
            world_size=dist.get_world_size(),
            applied_steps=self._applied_steps,
            groups=tuple(tuple(names[p] for p in group["params"]) for group in self.optimizer.param_groups),
            loss_scaler=self._loss_scaler,
        )


def _adamw(model: torch.nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with its moments in place, zero: the first step allocates nothing, and every state can be saved."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model, training.weight_decay),
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer
