"""The steps, tokens, days and money that a run or the phases of a pre-training take, before any of them is spent.

For a run also disks and host memory. Imports no torch.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ds_encdec.config.rules import ROLLBACK_FIELDS
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import global_batch_size, with_assumed_batch_size
from ds_encdec.gpus import DEFAULT_GPU, GPUS, has_gpu
from ds_encdec.memory.breakdown import in_gib
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.job import (
    Job,
    checkpoint_bytes,
    checkpoint_bytes_per_parameter,
    checkpoints_at_once,
    run_sizes,
    saves_at_most,
)
from ds_encdec.memory.question import indivisible, planned_checkpointing, planned_job
from ds_encdec.memory.recompute import needs_recompute_choice, with_recompute
from ds_encdec.memory.variants import Variant
from ds_encdec.memory.zero import swapped_bytes
from ds_encdec.phases import PlannedPhase, estimate_steps_for_tokens, estimate_training_time
from ds_encdec.quantities import count, disk_size, duration, short
from ds_encdec.types import ConfigError

EXPORT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes per parameter of a Hugging Face folder (`ds-encdec export --dtype`)."""
FEWEST_TO_AVERAGE = 3
"""Checkpoints without which a run averages none (`training.average_checkpoints`)."""
HOW_TO_KNOW_THE_TIME = (
    "How long this takes is not known: give --tokens-per-second (non-padding tokens of both sides, over all ranks), or "
    "--measured RUN, the folder of a run on the same machines, such as that of a phase."
)
DAYS_FROM = 2
"""Less is told in hours, minutes and seconds."""
NOT_COUNTED = "Evaluations, checkpoints and starts come on top."


def plan_run(
    config: FullConfig,
    *,
    nodes: int = 1,
    num_tokens: int | None = None,
    tokens_per_second: float | None = None,
    price_per_gpu_hour: float | None = None,
) -> dict[str, Any]:
    """The needs of the run on `infra.num_gpus` GPUs in `nodes` machines; docs/plan.md lists the keys. Sizes are bytes.

    `num_tokens`: of both sides, to train on; None: as many as `training.num_train_steps` make. `tokens_per_second`: of
    all ranks. Raises ConfigError for a batch or a number of GPUs that does not divide, or a model of unknown size.
    """
    if problems := list(indivisible(config, nodes)):
        raise ConfigError("\n".join(problems))
    if config.training.num_train_epochs is not None and num_tokens is None:
        raise ConfigError(
            "training.num_train_epochs is counted in steps when a run starts and looks at its data: for a plan give "
            "training.num_train_steps, or --tokens"
        )
    sizes, remarks = run_sizes(config), list[str]()
    if needs_recompute_choice(config):
        choice = planned_checkpointing(config, sizes, nodes, GPUS[DEFAULT_GPU])
        config, remarks = with_recompute(config, choice.mode), [f"{choice}, on an {DEFAULT_GPU}."]
    config = with_assumed_batch_size(config, config.infra.num_gpus)
    job = planned_job(config, sizes, nodes)
    sequences = global_batch_size(config, job.world_size)
    length = config.data.max_encoder_length + config.data.max_decoder_length
    steps = config.training.num_train_steps
    if num_tokens is not None:
        # However a step is divided into micro-batches, it has these sequences.
        steps = estimate_steps_for_tokens(num_tokens, sequences, length, 1, 1)
    return {
        "num_gpus": job.world_size,
        "device": config.infra.device,
        "nodes": nodes,
        "parameters": job.parameters,
        "trainable": job.trainable_parameters,
        "sequences_per_step": sequences,
        "tokens_per_step": sequences * length,
        "steps": steps,
        "num_train_steps": config.training.num_train_steps,
        "tokens": steps * sequences * length,
        "num_tokens": num_tokens,
        "tokens_per_second": tokens_per_second,
        **_cost(steps * sequences * length, job.world_size, tokens_per_second, price_per_gpu_hour),
        "disk": _disk(job, steps),
        "host_bytes_per_node": Variant(job, estimate(job)).node_bytes,
        "nvme_bytes_per_node": swapped_bytes(job),
        "remarks": remarks,
    }


def _cost(tokens: int, num_gpus: int, tokens_per_second: float | None, usd_per_hour: float | None) -> dict[str, Any]:
    """`time` (`estimate_training_time`) and `usd`, None where they cannot be known; `usd_per_hour` is of one GPU."""
    time = estimate_training_time(tokens, 1 / tokens_per_second) if tokens_per_second else None
    return {"time": time, "usd": time["hours"] * num_gpus * usd_per_hour if time and usd_per_hour else None}


def _disk(job: Job, steps: int) -> dict[str, Any]:
    """Bytes in the run's folder at its fullest; logs and the tokenizer, some megabytes, are not counted."""
    training, monitor = job.config.training, job.config.monitor
    checkpoint = checkpoint_bytes(job)
    saves = saves_at_most(training, steps)
    keep = saves if training.save_total_limit is None else training.save_total_limit
    checkpoints = checkpoints_at_once(training, saves)
    abandoned = keep if any(getattr(monitor, field) == "rollback" for field in ROLLBACK_FIELDS) else 0
    averages = training.average_checkpoints and min(saves, keep) >= FEWEST_TO_AVERAGE
    exported = EXPORT_BYTES["float32"] * job.parameters
    at_end, averaged = exported * training.export_at_end, exported * bool(averages)
    return {
        "checkpoint": checkpoint,
        "checkpoint_bytes_per_parameter": checkpoint_bytes_per_parameter(job),
        "checkpoints": checkpoints,
        "abandoned_checkpoints": abandoned,
        "averaged": averaged,
        "exported": at_end,
        "total": checkpoint * (checkpoints + abandoned) + averaged + at_end,
        "export": {dtype: size * job.parameters for dtype, size in EXPORT_BYTES.items()},
    }


def describe_plan(plan: Mapping[str, Any]) -> str:
    """The plan in words."""
    disk, time = plan["disk"], plan["time"]
    money = "" if plan["usd"] is None else f" and {plan['usd']:,.2f} USD"
    hours = f" ({time['hours']:,.1f} hours)" if time and time["days"] >= DAYS_FROM else ""
    put_aside, at_end = disk["abandoned_checkpoints"], disk["averaged"] + disk["exported"]
    exports = " or ".join(f"{disk_size(size)} in {dtype}" for dtype, size in disk["export"].items())
    lines = [
        f"{plan['steps']:,} steps of {plan['tokens_per_step']:,} tokens ({plan['sequences_per_step']:,} sequences, "
        f"padding included) are {plan['tokens']:,} tokens, on {_ranks(plan)} in {count(plan['nodes'], 'node')}.",
        f"Set training.num_train_steps={plan['steps']} for it (now {plan['num_train_steps']:,})."
        if plan["steps"] != plan["num_train_steps"]
        else "",
        f"At {plan['tokens_per_second']:,.0f} tokens/s it takes {_how_long(time['days'])}{hours}{money}. {NOT_COUNTED}"
        if time
        else HOW_TO_KNOW_THE_TIME,
        f"A checkpoint takes {disk_size(disk['checkpoint'])} ({disk['checkpoint_bytes_per_parameter']:.3g} bytes for "
        f"each of {plan['trainable']:,} trained parameters). The run's folder grows to {disk_size(disk['total'])}: "
        f"{count(disk['checkpoints'], 'checkpoint')} (those kept, the best, the one being written)"
        + (f", {put_aside} put aside by rollbacks" if put_aside else "")
        + (f", and the models at its end, {disk_size(at_end)}" if at_end else "")
        + ".",
        f"An export takes {exports}.",
        f"Each node's ranks need {in_gib(plan['host_bytes_per_node'])} GiB of host memory{_of_cpus(plan)}.",
        f"The disk of infra.nvme_path holds {disk_size(swapped)} on each node: the optimizer's states and gradients."
        if (swapped := plan["nvme_bytes_per_node"])
        else "",
        *plan["remarks"],
    ]
    return "\n".join(line for line in lines if line)


def _of_cpus(plan: Mapping[str, Any]) -> str:
    """A remark on where the ranks compute, which the memory of their hosts depends on."""
    if plan["device"] == "cpu":
        return ", all there is: they compute on CPUs"
    return "" if has_gpu() else " beside their GPUs (CPUs alone: infra.device=cpu)"


def plan_of_phases(
    plans: Sequence[PlannedPhase], *, tokens_per_second: float | None = None, price_per_gpu_hour: float | None = None
) -> dict[str, Any]:
    """`phases`, one dict each, and their `total`.

    Each phase has the `steps` it would make, `ends_with` (`steps`, `tokens`, or `--steps-per-phase`), `num_train_steps`
    and `steps_for_tokens`, the two numbers of which the smaller counts, `tokens` of its steps, `num_tokens` asked for,
    `tokens_per_step`; `time` (`estimate_training_time`) and `usd`, None where they cannot be known.
    """
    num_gpus = plans[0].config.infra.num_gpus
    phases: list[dict[str, Any]] = [
        {
            "phase": str(planned.phase),
            "description": planned.settings.description,
            "steps": planned.num_steps,
            "ends_with": min(
                (planned.settings.num_train_steps, "steps"),
                (planned.steps_for_tokens, "tokens"),
                (planned.num_steps, "--steps-per-phase"),
                key=lambda limit: limit[0],
            )[1],
            "num_train_steps": planned.settings.num_train_steps,
            "steps_for_tokens": planned.steps_for_tokens,
            "tokens": planned.num_steps * planned.tokens_per_step,
            "num_tokens": planned.settings.num_tokens,
            "tokens_per_step": planned.tokens_per_step,
            **_cost(planned.num_steps * planned.tokens_per_step, num_gpus, tokens_per_second, price_per_gpu_hour),
        }
        for planned in plans
    ]
    sums = {name: sum(phase[name] for phase in phases) for name in ("steps", "tokens")}
    whole = _cost(sums["tokens"], num_gpus, tokens_per_second, price_per_gpu_hour)
    return {
        "tokens_per_second": tokens_per_second,
        "num_gpus": num_gpus,
        "device": plans[0].config.infra.device,
        "phases": phases,
        "total": {**sums, "days": whole["time"] and whole["time"]["days"], "usd": whole["usd"]},
    }


def describe_plan_of_phases(plan: Mapping[str, Any]) -> str:
    """The phases as a table of at most 80 columns, and below it what is not known of them."""
    columns = {"phase": str.ljust, "ends after": str.ljust, "runs": str.rjust, "time": str.rjust, "USD": str.rjust}
    rows = []
    for row in [*plan["phases"], {"phase": "total", **plan["total"]}]:
        days = row["days"] if "days" in row else row["time"] and row["time"]["days"]
        limits = f"{short(row['num_train_steps'])} steps or {short(row['num_tokens'])}" if "num_tokens" in row else ""
        runs = f"{short(row['steps'])} steps, {short(row['tokens'])}"
        usd = "" if row["usd"] is None else short(row["usd"], 2)
        rows.append((row["phase"], limits, runs, "" if days is None else _how_long(days), usd))
    cells = [column for column in zip(columns, *rows, strict=True) if any(column[1:])]
    padded = [[columns[name](cell, max(map(len, (name, *rest)))) for cell in (name, *rest)] for name, *rest in cells]
    lines = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
    rate, cut = plan["tokens_per_second"], any(row["ends_with"] == "--steps-per-phase" for row in plan["phases"])
    remarks = (
        "A phase ends after its steps or its tokens (M, B, T: millions, billions, trillions), whichever come first"
        f"{', or after --steps-per-phase' if cut else ''}.",
        f"{plan['phases'][0]['tokens_per_step']:,} tokens a step, padding included, on "
        f"{_ranks(plan)} as infra.num_gpus says.",
        HOW_TO_KNOW_THE_TIME if rate is None else f"At {rate:,.0f} tokens/s. {NOT_COUNTED}",
    )
    return "\n".join([*lines, *(line for remark in remarks for line in textwrap.wrap(remark, 80))])


def _ranks(plan: Mapping[str, Any]) -> str:
    return count(plan["num_gpus"], "GPU" if plan["device"] == "cuda" else "rank")


def _how_long(days: float) -> str:
    return f"{days:,.{2 if days < 100 else 0}f} days" if days >= DAYS_FROM else duration(days * 86400)
