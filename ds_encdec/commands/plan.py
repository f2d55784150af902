"""Compute the steps, tokens, days and money of a run or of phases, and a run's space on disks and in host memory."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ds_encdec.base.quantities import count, disk_size, duration, in_gib, short
from ds_encdec.base.types import ConfigError
from ds_encdec.commands.phases.plan import PlannedPhase, estimate_training_time
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import global_batch_size, with_assumed_batch_size
from ds_encdec.config.training_rules import ROLLBACK_FIELDS
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.gpus import DEFAULT_GPU, GPUS, has_gpu
from ds_encdec.memory.job import (
    Job,
    checkpoint_bytes,
    checkpoint_bytes_per_parameter,
    checkpoints_at_once,
    run_sizes,
    saves_at_most,
)
from ds_encdec.memory.question import indivisible, planned_checkpointing, planned_job
from ds_encdec.memory.variants import Variant
from ds_encdec.memory.zero import swapped_bytes

EXPORT_BYTES = {"float32": 4, "bfloat16": 2}  # per parameter of a Hugging Face folder (`ds-encdec export --dtype`)
FEWEST_TO_AVERAGE = 3  # checkpoints of which a run makes an average (`training.average_checkpoints`)
HOW_TO_KNOW_THE_TIME = (
    "How long this takes is not known: give --tokens-per-second (non-padding tokens of both sides, over all ranks), or "
    "--measured RUN, the folder of a run on the same machines, such as that of a phase."
)
NOT_COUNTED = "Evaluations, checkpoints and starts come on top."


def plan_run(
    config: FullConfig,
    *,
    nodes: int = 1,
    num_tokens: int | None = None,
    tokens_per_second: float | None = None,
    price_per_gpu_hour: float | None = None,
) -> dict[str, Any]:
    """Return the needs of the run on `infra.num_gpus` GPUs in `nodes` machines, in bytes (docs/plan.md). `num_tokens`
    replaces `training.num_train_steps`. Raises ConfigError for what does not divide, or a model of unknown size."""
    if problems := list(indivisible(config, nodes)):
        raise ConfigError("\n".join(problems))
    if config.training.num_train_epochs is not None and num_tokens is None:
        raise ConfigError(
            "training.num_train_epochs is counted in steps when a run starts and looks at its data: for a plan give "
            "training.num_train_steps, or --tokens"
        )
    sizes = run_sizes(config)
    config, choice = planned_checkpointing(config, sizes, nodes, GPUS[DEFAULT_GPU])
    config = with_assumed_batch_size(config, config.infra.num_gpus)
    job = planned_job(config, sizes, nodes)
    sequences = global_batch_size(config, job.world_size)
    tokens_per_step = sequences * (config.data.max_encoder_length + config.data.max_decoder_length)
    steps = config.training.num_train_steps if num_tokens is None else math.ceil(num_tokens / tokens_per_step)
    return {
        "num_gpus": job.world_size,
        "device": config.infra.device,
        "nodes": nodes,
        "parameters": job.parameters,
        "trainable": job.trainable_parameters,
        "sequences_per_step": sequences,
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "num_train_steps": config.training.num_train_steps,
        "tokens": steps * tokens_per_step,
        "num_tokens": num_tokens,
        "tokens_per_second": tokens_per_second,
        **_cost(steps * tokens_per_step, job.world_size, tokens_per_second, price_per_gpu_hour),
        "disk": _disk(job, steps),
        "host_bytes_per_node": Variant(job, estimate(job)).node_bytes,
        "nvme_bytes_per_node": swapped_bytes(job),
        "remarks": [f"{choice}, on an {DEFAULT_GPU}."] if choice else [],
    }


def _cost(tokens: int, num_gpus: int, tokens_per_second: float | None, usd_per_hour: float | None) -> dict[str, Any]:
    time = estimate_training_time(tokens, 1 / tokens_per_second) if tokens_per_second else None
    return {"time": time, "usd": time["hours"] * num_gpus * usd_per_hour if time and usd_per_hour else None}


def _disk(job: Job, steps: int) -> dict[str, Any]:  # without logs and the tokenizer (some megabytes)
    training, monitor = job.config.training, job.config.monitor
    checkpoint, saves = checkpoint_bytes(job), saves_at_most(training, steps)
    keep = saves if training.save_total_limit is None else training.save_total_limit
    checkpoints = checkpoints_at_once(training, saves)
    abandoned = keep if any(getattr(monitor, field) == "rollback" for field in ROLLBACK_FIELDS) else 0
    export = {dtype: size * job.parameters for dtype, size in EXPORT_BYTES.items()}
    at_end = export["float32"] * training.export_at_end
    averaged = export["float32"] if training.average_checkpoints and min(saves, keep) >= FEWEST_TO_AVERAGE else 0
    return {
        "checkpoint": checkpoint,
        "checkpoint_bytes_per_parameter": checkpoint_bytes_per_parameter(job),
        "checkpoints": checkpoints,
        "abandoned_checkpoints": abandoned,
        "averaged": averaged,
        "exported": at_end,
        "total": checkpoint * (checkpoints + abandoned) + averaged + at_end,
        "export": export,
    }


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Return the plan in words."""
    disk, time, steps = plan["disk"], plan["time"], plan["steps"]
    lines = [
        f"{steps:,} steps of {plan['tokens_per_step']:,} tokens ({plan['sequences_per_step']:,} sequences, padding "
        f"included) are {plan['tokens']:,} tokens, on {_ranks(plan)} in {count(plan['nodes'], 'node')}."
    ]
    if steps != plan["num_train_steps"]:
        lines.append(f"Set training.num_train_steps={steps} for it (now {plan['num_train_steps']:,}).")
    if time is None:
        lines.append(HOW_TO_KNOW_THE_TIME)
    else:
        takes = duration(time["seconds"]) + (f" ({time['hours']:,.1f} hours)" if time["days"] >= 2 else "")
        takes += "" if plan["usd"] is None else f" and {plan['usd']:,.2f} USD"
        lines.append(f"At {plan['tokens_per_second']:,.0f} tokens/s it takes {takes}. {NOT_COUNTED}")
    where = "" if has_gpu() else " beside their GPUs (CPUs alone: infra.device=cpu)"
    if plan["device"] == "cpu":
        where = ", all there is: they compute on CPUs"
    put_aside, at_end = disk["abandoned_checkpoints"], disk["averaged"] + disk["exported"]
    lines += [
        f"A checkpoint takes {disk_size(disk['checkpoint'])} ({disk['checkpoint_bytes_per_parameter']:.3g} bytes for "
        f"each of {plan['trainable']:,} trained parameters). The run's folder grows to {disk_size(disk['total'])}: "
        f"{count(disk['checkpoints'], 'checkpoint')} (those kept, the best, the one being written)"
        + (f", {put_aside} put aside by rollbacks" if put_aside else "")
        + (f", and the models at its end, {disk_size(at_end)}." if at_end else "."),
        f"An export takes {' or '.join(f'{disk_size(size)} in {dtype}' for dtype, size in disk['export'].items())}.",
        f"Each node's ranks need {in_gib(plan['host_bytes_per_node'])} GiB of host memory{where}.",
    ]
    if swapped := plan["nvme_bytes_per_node"]:
        lines.append(
            f"The disk of infra.nvme_path holds {disk_size(swapped)} on each node: optimizer states and gradients."
        )
    return "\n".join([*lines, *plan["remarks"]])


def plan_of_phases(
    plans: Sequence[PlannedPhase], *, tokens_per_second: float | None = None, price_per_gpu_hour: float | None = None
) -> dict[str, Any]:
    """Return `phases`, a dict for each, and their `total`. `ends_with` names what decides `steps`; `tokens` are those
    of the steps, `num_tokens` the limit. `time` (`estimate_training_time`) and `usd` are None if unknown."""
    infra, phases = plans[0].config.infra, []
    for planned in plans:
        settings, steps = planned.settings, planned.config.training.num_train_steps
        tokens = steps * planned.tokens_per_step
        limits = {"steps": settings.num_train_steps, "tokens": planned.steps_for_tokens, "--steps-per-phase": steps}
        phases.append(
            {
                "phase": str(planned.phase),
                "description": settings.description,
                "steps": steps,
                "ends_with": min(limits, key=lambda name: limits[name]),
                "num_train_steps": settings.num_train_steps,
                "steps_for_tokens": planned.steps_for_tokens,
                "tokens": tokens,
                "num_tokens": settings.num_tokens,
                "tokens_per_step": planned.tokens_per_step,
                **_cost(tokens, infra.num_gpus, tokens_per_second, price_per_gpu_hour),
            }
        )
    sums = {name: sum(phase[name] for phase in phases) for name in ("steps", "tokens")}
    return {
        "tokens_per_second": tokens_per_second,
        "num_gpus": infra.num_gpus,
        "device": infra.device,
        "phases": phases,
        "total": {**sums, **_cost(sums["tokens"], infra.num_gpus, tokens_per_second, price_per_gpu_hour)},
    }


def describe_plan_of_phases(plan: Mapping[str, Any]) -> str:
    """Return the phases as a table of at most 80 columns, with remarks below it."""
    table = [["phase", "ends after", "runs", "time", "USD"]]
    for row in [*plan["phases"], {"phase": "total", **plan["total"]}]:
        limits = f"{short(row['num_train_steps'])} steps or {short(row['num_tokens'])}" if "num_tokens" in row else ""
        time = "" if row["time"] is None else duration(row["time"]["seconds"])
        usd = "" if row["usd"] is None else short(row["usd"], 2)
        table.append([row["phase"], limits, f"{short(row['steps'])} steps, {short(row['tokens'])}", time, usd])
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    aligned = (f"{{:{'<' if number < 2 else '>'}{max(map(len, column))}}}" for number, column in enumerate(columns))
    pattern = "  ".join(aligned)
    rate, cut = plan["tokens_per_second"], any(row["ends_with"] == "--steps-per-phase" for row in plan["phases"])
    remarks = (
        "A phase ends after its steps or its tokens (M, B, T: millions, billions, trillions), whichever come first"
        f"{', or after --steps-per-phase' if cut else ''}.",
        f"{plan['phases'][0]['tokens_per_step']:,} tokens a step, padding included, on {_ranks(plan)} "
        "(infra.num_gpus).",
        HOW_TO_KNOW_THE_TIME if rate is None else f"At {rate:,.0f} tokens/s. {NOT_COUNTED}",
    )
    rows = [pattern.format(*cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join([*rows, *(textwrap.fill(remark, 80) for remark in remarks)])


def _ranks(plan: Mapping[str, Any]) -> str:
    return count(plan["num_gpus"], "GPU" if plan["device"] == "cuda" else "rank")
