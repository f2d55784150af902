"""What the phases would take: steps, tokens, time and money, before any is spent. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_encdec.phases import PlannedPhase, estimate_training_time

HOW_TO_KNOW_THE_TIME = (
    "How long this takes is not known: give --tokens-per-second (non-padding tokens of both sides, over all ranks), or "
    "--measured RUN, the folder of a run on the same machines, such as that of a phase."
)


def estimate_phases(
    plans: Sequence[PlannedPhase], *, tokens_per_second: float | None, price_per_gpu_hour: float | None
) -> dict[str, Any]:
    """`phases`, one dict each, and their `total`.

    Of a phase: `steps` it would make, `ends_with` (`steps`, `tokens`, or `--steps-per-phase`), `num_train_steps` and
    `steps_for_tokens`, the two numbers of which the smaller counts, `tokens` of its steps, `num_tokens` asked for,
    `tokens_per_step`; `time` (`estimate_training_time`) and `usd`, None where they cannot be known.
    """
    phases = [_estimate(planned, tokens_per_second, price_per_gpu_hour) for planned in plans]
    return {
        "tokens_per_second": tokens_per_second,
        "num_gpus": plans[0].config.infra.num_gpus,
        "phases": phases,
        "total": {
            "steps": sum(phase["steps"] for phase in phases),
            "tokens": sum(phase["tokens"] for phase in phases),
            "days": sum(phase["time"]["days"] for phase in phases) if tokens_per_second else None,
            "usd": sum(phase["usd"] for phase in phases) if tokens_per_second and price_per_gpu_hour else None,
        },
    }


def _estimate(
    planned: PlannedPhase, tokens_per_second: float | None, price_per_gpu_hour: float | None
) -> dict[str, Any]:
    time = usd = None
    if tokens_per_second:
        time = estimate_training_time(planned.num_steps, planned.tokens_per_step / tokens_per_second)
        if price_per_gpu_hour:
            usd = time["hours"] * planned.config.infra.num_gpus * price_per_gpu_hour
    return {
        "phase": str(planned.phase),
        "description": planned.settings.description,
        "steps": planned.num_steps,
        "ends_with": _ends_with(planned),
        "num_train_steps": planned.settings.num_train_steps,
        "steps_for_tokens": planned.steps_for_tokens,
        "tokens": planned.num_steps * planned.tokens_per_step,
        "num_tokens": planned.settings.num_tokens,
        "tokens_per_step": planned.tokens_per_step,
        "time": time,
        "usd": usd,
    }


def _ends_with(planned: PlannedPhase) -> str:
    if planned.num_steps < min(planned.settings.num_train_steps, planned.steps_for_tokens):
        return "--steps-per-phase"
    return "tokens" if planned.steps_for_tokens < planned.settings.num_train_steps else "steps"


def describe_estimate(estimate: Mapping[str, Any]) -> str:
    """The estimate as a table, and below it what it does not know."""
    total = estimate["total"]
    header = ("phase", "steps", "ends with", "its steps", "its tokens' steps", "tokens", "of", "days", "USD")
    rows = [_row(phase) for phase in estimate["phases"]]
    rows.append(
        (
            "total",
            f"{total['steps']:,}",
            "",
            "",
            "",
            f"{total['tokens']:,}",
            "",
            _shown(total["days"]),
            _shown(total["usd"]),
        )
    )
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.append(
        f"{estimate['phases'][0]['tokens_per_step']:,} tokens a step, padding included, on "
        f"{estimate['num_gpus']} GPU(s) as infra.num_gpus says."
    )
    if estimate["tokens_per_second"] is None:
        lines.append(HOW_TO_KNOW_THE_TIME)
    else:
        lines.append(
            f"At {estimate['tokens_per_second']:,.0f} tokens/s. Evaluations, checkpoints and starts come on top."
        )
    return "\n".join(lines)


def _row(phase: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        phase["phase"],
        f"{phase['steps']:,}",
        phase["ends_with"],
        f"{phase['num_train_steps']:,}",
        f"{phase['steps_for_tokens']:,}",
        f"{phase['tokens']:,}",
        f"{phase['num_tokens']:,}",
        _shown(phase["time"] and phase["time"]["days"]),
        _shown(phase["usd"]),
    )


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"
