"""Prints the section of BENCHMARKS.md, and the constants of the memory estimate, that a run of check.sh measured.

python scripts/gpu/report.py gpu_check/gpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, tuple[str, str]]
"""Head → key of the rows and format."""

SPEED_COLUMNS = {
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "MFU": ("mfu", "{:.1%}"),
    "micro-batch, ms": ("micro_batch_ms", "{:.0f}"),
    "step of the optimizer, ms": ("update_ms", "{:.0f}"),
    "tokens/s with 64 micro-batches a step": ("tokens_per_second_at_64", "{:,.0f}"),
    "peak, GiB": ("allocated_gib", "{:.1f}"),
    "estimate over peak": ("estimated_over_allocated", "{:.3f}"),
}
PROFILE_COLUMNS = {
    "kernels": ("kernels", "{:,}"),
    "device busy": ("busy", "{:.0%}"),
    "host, ms": ("host_ms", "{:.0f}"),
    "waits of the host": ("waits", "{}"),
}
MEMORY_COLUMNS = {
    "estimated, MiB": ("estimated_mib", "{:,.0f}"),
    "measured": ("measured_mib", "{:,.0f}"),
    "ratio": ("ratio", "{:.3f}"),
}
TOP = 12  # kernels of the fastest setting that are listed


class Found:
    """The rows of a check, by part."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.dry_run: bool = facts["dry_run"]
        self.seconds: float = facts["seconds"]
        self.parts: list[Mapping[str, Any]] = facts["parts"]
        self.left: list[str] = facts["left"]
        self.device = self.row("machine", "device").get("device", "no GPU")
        measured = [row for row in self.rows("speed") if not row["name"].startswith("profile of ")]
        self.speeds = sorted(measured, key=lambda row: -row["tokens_per_second"])
        """The settings of the 1.02 B model, the fastest first."""

    def rows(self, *parts: str) -> list[Row]:
        """The rows of all parts whose names begin with one of these words, but for what was left out."""
        rows = (row for one in self.parts if one["name"].split()[0] in parts for row in one["rows"])
        return [row for row in rows if "omitted" not in row]

    def row(self, part: str, name: str) -> Row:
        """One row; empty where it is missing."""
        return next((row for row in self.rows(part) if row["name"] == name), {})

    def most(self, figure: str) -> float | None:
        """The largest such figure of the speed settings, which have loaded all their kernels."""
        return max((row[figure] for row in self.speeds if figure in row), default=None)


def section(found: Found) -> Iterator[str]:
    """The lines of the section of BENCHMARKS.md."""
    versions, rates = found.row("machine", "versions"), found.row("machine", "rates")
    packages = ("torch", "triton", "deepspeed", "transformers")
    named = [f"{name} {versions[name]}" for name in packages if versions.get(name)]
    machine = ", ".join([f"{found.device}, {versions.get('cores')} cores, Python {versions.get('python')}", *named])
    if rates:
        machine += (
            f"; products of 8,192³ in bf16 {rates['bf16_tflops']:.0f} TFLOP/s, copies {rates['copy_tb_per_s']:.1f} TB/s"
        )
    yield "## A dry run, without a GPU" if found.dry_run else "## On a GPU"
    yield f"\n`scripts/gpu/check.sh`, {found.seconds:.0f} s. {machine}.\n"
    if found.speeds:
        yield from speed_lines(found)
    settings = found.rows("memory")
    title = f"The memory estimate against the measured peak, {len(settings)} settings:"
    yield from table(title, "setting", settings, MEMORY_COLUMNS)
    if beside := found.row("machine", "context"):
        nccl = found.row("machine", "nccl").get("nccl_gib", math.nan)
        yield (
            f"Beside tensors: context {beside['context_gib']:.2f} GiB, NCCL with one rank {nccl:.2f} GiB; "
            f"the allocator held up to {found.most('fragmentation') or 0:.1%} more than it had given out.\n"
        )
    steps = found.row("reference", "CPU, fp32").get("steps", 50)
    yield from table(
        f"Losses of {steps} steps of a tiny model against the CPU's in float32, largest difference in nats:",
        "run",
        found.rows("engine", "compile"),
        {"difference": ("largest_difference", "{:.1e}"), "bound": ("bound", "{:g}")},
    )
    errors = [
        {"name": row["name"], "error": max(values)}
        for row in found.rows("attention", "loss")
        if (values := [value for name, value in row.items() if isinstance(value, float) and name != "bound"])
    ]
    title = "Kernels against their references, largest relative error of results and gradients:"
    yield from table(title, "kernel", errors, {"error": ("error", "{:.1e}")})
    if failed := [f"{part['name']} ({_why(part)})" for part in found.parts if not part["ok"]]:
        yield f"Not passed: {'; '.join(failed)}.\n"
    if found.left:
        yield f"Cut off before the end of {', '.join(found.left)}.\n"


def speed_lines(found: Found) -> Iterator[str]:
    """The tables of speed, profiles, and the kernels of the fastest setting."""
    fastest, prefix = found.speeds[0], "profile of "
    title = (
        f"Steps of a model of {fastest['parameters']:,} parameters (random weights) on packed web-like documents, "
        f"{fastest['documents']:.1f} and {fastest['tokens_a_micro_batch']:,.0f} tokens a micro-batch:"
    )
    yield from table(title, "setting", found.speeds, SPEED_COLUMNS)
    profiles = [row for row in found.rows("speed") if row["name"].startswith(prefix)]
    named = [{**row, "name": row["name"].removeprefix(prefix)} for row in profiles]
    yield from table("A step of one micro-batch:", "setting", named, PROFILE_COLUMNS)
    top = found.row("speed", f"{prefix}{fastest['name']}").get("top", [])[:TOP]
    kernels = [{**row, "name": f"`{row['kernel'][:100]}`".replace("|", "/")} for row in top]
    columns = {"ms": ("ms", "{:.2f}"), "calls": ("count", "{:,}")}
    yield from table(f"Kernels of {fastest['name']}, a step of one micro-batch:", "kernel", kernels, columns)


def table(title: str, first: str, rows: Sequence[Row], columns: Columns) -> Iterator[str]:
    """A sentence and a Markdown table below it; nothing without rows. A dash where a row has no figure."""
    if not rows:
        return
    yield f"{title}\n\n| {' | '.join([first, *columns])} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for row in rows:
        cells = ("-" if row.get(key) is None else shape.format(row[key]) for key, shape in columns.values())
        yield f"| {' | '.join([row['name'], *cells])} |"
    yield ""


def _why(part: Mapping[str, Any]) -> str:
    return part["problem"] or "; ".join(row["name"] for row in part["rows"] if not row["ok"])


def constants(found: Found) -> Iterator[str]:
    """The constants of ds_encdec/memory/estimate.py and docs/memory.md that the figures replace, rounded up."""
    on = f"({found.device}, torch {found.row('machine', 'versions').get('torch')})"
    if (context := found.most("beside_allocator_gib")) is not None:
        yield f"CUDA_CONTEXT_BYTES = {_up(context, 0.05):g} * GIB  # measured: {context:.2f} GiB {on}"
    if (share := found.most("fragmentation")) is not None:
        yield f"FRAGMENTATION = {_up(share, 0.005):g}  # measured: {share:.1%} {on}"
    if found.row("machine", "nccl").get("ranks", 1) < 2:
        yield "NCCL_BYTES stays an assumption: one rank has no channels to others"


def _up(value: float, step: float) -> float:
    """`value` rounded up to a multiple of `step`: an estimate errs on the safe side."""
    return round(math.ceil(value / step - 1e-9) * step, 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what check.sh has written, or its folder")
    options = parser.parse_args()
    path = options.json / "gpu.json" if options.json.is_dir() else options.json
    found = Found(json.loads(path.read_text()))
    print(*section(found), sep="\n")
    if found.dry_run:
        print("A dry run: nothing follows from it.")
    else:
        print("For ds_encdec/memory/estimate.py and docs/memory.md:", *constants(found), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
