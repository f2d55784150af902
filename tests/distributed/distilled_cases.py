"""What runs inside the ranks beside a teacher, and the same in plain torch in one process."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import full_weights, save, saved_state
from small_run import SHORT_MODEL, run_config, train_on, weights
from taught import batch_of, reference, student_vocabulary
from torch_oracle import TorchOracle
from transformers import AutoModelForCausalLM

from ds_encdec.base.types import Batch, LossSum
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.select import create_engine, resolve_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import discover
from ds_encdec.model.distillation import resolve_teacher
from ds_encdec.registry.objectives import COLUMNS

LANES = 4  # of each step, on 1, 2 or 4 ranks
TASKS = (("S", "R1", "SFT"), ("R1", "X1"), ("S", "S"), ("X2", "SFT"))
"""Of each lane: the second has nothing that a decoder teaches, and so a rank has nothing while another has."""
TEACHING: dict[str, Any] = {"teacher_weight": 0.6, "teacher_temperature": 1.7}
STEPS = 3


def lanes(step: int) -> list[Batch]:
    return [batch_of(tasks, 100 * step + lane) for lane, tasks in enumerate(TASKS)]


def taught_config(teacher: str, ranks: int, **overrides: Any) -> FullConfig:
    return run_config(teacher=teacher, gradient_accumulation_steps=LANES // ranks, **TEACHING, **overrides)


class TaughtOracle(TorchOracle):
    """The oracle beside transformers' own model, with its logits whole."""

    def __init__(self, config: FullConfig) -> None:
        super().__init__(config, SHORT_MODEL, weights)
        folder, self.sums = str(config.training.teacher), torch.zeros(2)
        self.teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _loss(self, batch: Batch) -> LossSum:
        total, losses, divergences = reference(self.model, self.teacher, batch, *TEACHING.values())
        self.sums += torch.tensor([divergences.sum(), losses.sum()])
        return LossSum(total, *torch.zeros(2, len(COLUMNS)))


def oracle_run(teacher: str, **overrides: Any) -> dict[str, Any]:
    oracle, steps = TaughtOracle(taught_config(teacher, 1, **overrides)), []
    for step in range(STEPS):
        batches, oracle.sums = lanes(step), torch.zeros(2)
        total, result = train_on(oracle, batches, sum(batch.target_tokens for batch in batches))
        steps.append({"total": total, "grad_norm": float(result.grad_norm), "sums": oracle.sums.tolist()})
    return {"steps": steps, "weights": {name: one.detach() for name, one in oracle.named.items()}}


def taught_engine(config: FullConfig, *, is_new: bool = True) -> Any:
    context = RunContext(discover(os.environ), torch.device("cpu"), resolve_engine(config), HostCollectives())
    teacher = resolve_teacher(config, *student_vocabulary())
    steps = config.training.gradient_accumulation_steps
    source = weights if is_new or config.model.lora is not None else None
    return create_engine(config, context, SHORT_MODEL, source, steps, teacher)


def take_step(engine: Any, step: int) -> dict[str, Any]:
    mine, sums = lanes(step)[dist.get_rank() :: dist.get_world_size()], torch.zeros(3)
    for number, (batch, loss) in enumerate(zip(mine, engine.losses(mine), strict=True), start=1):
        tokens = sum(one.target_tokens for one in lanes(step))
        engine.backward(loss, num_losses=tokens, last=number == len(mine))
        figure = COLUMNS.index("distillation_loss")
        sums += torch.stack([loss.total.detach(), loss.sums[figure], loss.sums.sum() - loss.sums[figure]]).cpu()
        assert float(loss.counts.sum() - loss.counts[figure]) == batch.target_tokens
    dist.all_reduce(sums)
    return {"total": float(sums[0]), "grad_norm": float(engine.step().grad_norm), "sums": sums[1:].tolist()}


def by_owner(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """All weights in full, the student's and the teacher's."""
    weights = full_weights(engine)
    of_teacher = {name for name in weights if name.startswith("teacher.")}
    return {
        "weights": {name: one for name, one in weights.items() if name not in of_teacher},
        "teacher": {name.removeprefix("teacher."): weights[name] for name in of_teacher},
    }


def training(teacher: str, directory: str | None = None, **overrides: Any) -> dict[str, Any]:
    """Three steps, and an evaluation before and after; with a `directory`, a save behind the first."""
    engine = taught_engine(taught_config(teacher, dist.get_world_size(), **overrides))
    before = [loss.sums.tolist() for loss in engine.evaluate(lanes(9))]
    steps = [take_step(engine, 0)]
    files = [] if directory is None else save(engine, Path(directory))
    steps += [take_step(engine, step) for step in range(1, STEPS)]
    result = {
        "evaluated": before,
        "steps": steps,
        **by_owner(engine),
        "exported": [name for name, _ in engine.full_parameters()],
        "digest": engine.replica_digest(),
        "files": files,
    }
    engine.close()
    return result


def going_on(teacher: str, directory: str, **overrides: Any) -> dict[str, Any]:
    """Load what any engine saved behind the first step, and make the other two."""
    engine = taught_engine(taught_config(teacher, dist.get_world_size(), **overrides), is_new=False)
    saved = saved_state(Path(directory))
    engine.load(saved)
    steps = [take_step(engine, step) for step in range(1, STEPS)]
    result = {"shapes": list(saved.shapes), "steps": steps, **by_owner(engine)}
    engine.close()
    return result


def run_cases(cases: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Run `training` or `going_on` with each case's settings."""
    return {name: globals()[function](**given) for name, function, given in cases}
