"""The DeepSpeed engine: ZeRO 0 to 3 with optimizer and parameter offload, behind `protocol.Engine`.

Averaging. DeepSpeed averages gradients over ranks and would divide by the accumulation steps; here every
micro-batch's loss is a *sum* over tokens, and the divisor is the number of target tokens of the whole
step. So the loss is multiplied by world size / target tokens and `scale_wrt_gas=False` turns the other
division off. Micro-batch boundaries are told to DeepSpeed explicitly; its own count is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from ds_encdec.config.rules import NATIVE_SCHEDULES
from ds_encdec.config.schema import FullConfig, TrainingConfig
from ds_encdec.engine import zero_files
from ds_encdec.engine.forward import compute_dtype, packed_forward
from ds_encdec.engine.layout import layout_of
from ds_encdec.engine.protocol import Veto
from ds_encdec.engine.sharded_model import assert_ties, build_model, load_weights, set_master_weights
from ds_encdec.engine.step_gate import step_gate
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.optim.param_groups import parameter_groups
from ds_encdec.optim.schedules import rate_factor
from ds_encdec.types import Batch, LossSum, StepResult, WeightSource


class DeepSpeedEngine:
    """`protocol.Engine` on `deepspeed.initialize`. Every method is collective: all ranks, same order."""

    def __init__(
        self,
        config: FullConfig,
        model_config: Qwen3Seq2SeqConfig,
        weights: WeightSource | None,
        ds_json: dict[str, Any],
        device: torch.device,
    ) -> None:
        """Build the model from `weights` (rank 0 reads them) and give it to DeepSpeed.

        Without `weights` the parameters hold anything until `load`. `ds_json`: the complete DeepSpeed configuration,
        without "auto" values. The process group exists.
        """
        training = config.training
        checkpointing = training.activation_checkpointing
        assert checkpointing != "selective"  # the schema leaves that to FSDP2
        self.device = device
        self._layout = layout_of(config, dist.get_world_size())
        model = build_model(model_config, ds_json, dtype=compute_dtype(training), device=device)
        rounded = load_weights(model, weights) if weights else []
        apply_activation_checkpointing(
            model,
            checkpointing,
            every_n=training.activation_checkpointing_every_n,
            offload=training.activation_offload,
        )
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model, training.weight_decay),
            config=ds_json,
            lr_scheduler=_scheduler_hook(training),
            dist_init_required=False,
        )
        assert_ties(model)
        if weights and self._engine.zero_optimization():
            set_master_weights(model, weights, rounded, device)
        self.model: torch.nn.Module = self._engine.module
        self._gate = step_gate(self._engine)
        self._engine.train()

    def forward(self, batch: Batch) -> LossSum:
        """See protocol.Engine."""
        return packed_forward(self._engine, batch.to(self.device))

    def backward(self, loss_sum: LossSum, *, target_tokens: int, last: bool) -> None:
        """See protocol.Engine. A step without any target has a zero gradient."""
        self._engine.set_gradient_accumulation_boundary(last)
        scale = dist.get_world_size() / max(target_tokens, 1)
        self._engine.backward(loss_sum.total * scale, scale_wrt_gas=False)

    def step(self, veto: Veto | None = None) -> StepResult:
        """See protocol.Engine. A step with a non-finite norm is skipped, whatever the dtype and stage."""
        learning_rate = float(self._engine.get_lr()[0])
        applied, grad_norm = self._gate.step(veto)
        return StepResult(applied=applied, grad_norm=grad_norm, learning_rate=learning_rate)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """See protocol.Engine."""
        self._engine.eval()
        try:
            return self.forward(batch)
        finally:
            self._engine.train()

    def save(self, directory: Path) -> list[Path]:
        """See protocol.Engine. DeepSpeed's own files, see zero_files."""
        return zero_files.save(self._engine, directory, self._layout)

    def load(self, directory: Path) -> None:
        """See protocol.Engine. Under ZeRO-3 only before the first step. Rates and decay stay this run's."""
        zero_files.load(self._engine, directory, self._layout)

    def close(self) -> None:
        """See protocol.Engine. Afterwards drop the last reference to the engine."""
        self._engine.destroy()


def _scheduler_hook(training: TrainingConfig) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """Our schedules as DeepSpeed wants them; None for its own, which it builds from the JSON."""
    if training.lr_scheduler_type in NATIVE_SCHEDULES:
        return None
    return lambda optimizer: LambdaLR(optimizer, lambda update_index: rate_factor(update_index, training))
