"""Prints the section of BENCHMARKS.md, and the constants of the memory estimate, that a run of check.sh measured.

python scripts/gpu/report.py gpu_check/gpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TITLE = "## On a GPU"
DRY_TITLE = "## A dry run, without a GPU"
Row = Mapping[str, Any]

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
TOP = 12  # kernels of the fastest setting that are listed


class Found:
    """The rows of a check, by part."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.dry_run: bool = facts["dry_run"]
        self.seconds: float = facts["seconds"]
        self.parts: list[Mapping[str, Any]] = facts["parts"]
        self.left: list[str] = facts["left"]

    def rows(self, part: str) -> Iterator[Row]:
        """The rows of all parts whose names begin so, but for what was left out."""
        for one in self.parts:
            if one["name"].split()[0] == part:
                yield from (row for row in one["rows"] if "omitted" not in row)

    def row(self, part: str, name: str) -> Row:
        """One row; empty where it is missing."""
        return next((row for row in self.rows(part) if row["name"] == name), {})

    @property
    def speeds(self) -> list[Row]:
        """The settings of the 1.04 B model, the fastest first."""
        rows = [row for row in self.rows("speed") if not row["name"].startswith("profile of ")]
        return sorted(rows, key=lambda row: -row["tokens_per_second"])

    @property
    def device(self) -> str:
        """The device's name."""
        return self.row("machine", "device").get("device", "no GPU")

    @property
    def measured_on(self) -> str:
        """Device and torch's version, for a sentence."""
        return f"{self.device}, torch {self.row('machine', 'versions').get('torch')}"


def section(found: Found) -> str:
    """The section of BENCHMARKS.md."""
    versions = found.row("machine", "versions")
    rates = found.row("machine", "rates")
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "deepspeed", "transformers") if versions.get(name)
    )
    machine = f"{found.device}, {versions.get('cores')} cores, Python {versions.get('python')}, {named}"
    if rates:
        machine += (
            f"; products of 8,192³ in bf16 {rates['bf16_tflops']:.0f} TFLOP/s, copies {rates['copy_tb_per_s']:.1f} TB/s"
        )
    lines = [
        DRY_TITLE if found.dry_run else TITLE,
        "",
        f"`scripts/gpu/check.sh`, {found.seconds:.0f} s. {machine}.",
        "",
    ]
    lines += _speed_lines(found)
    lines += _memory_lines(found)
    lines += _parity_lines(found)
    if failed := [part for part in found.parts if not part["ok"]]:
        lines += ["Not passed: " + "; ".join(f"{part['name']} ({_why(part)})" for part in failed) + ".", ""]
    if found.left:
        lines += [f"Cut off before the end of {', '.join(found.left)}.", ""]
    return "\n".join(lines)


def _speed_lines(found: Found) -> Iterator[str]:
    if not found.speeds:
        return
    fastest = found.speeds[0]
    yield (
        f"Steps of a model of {fastest['parameters']:,} parameters (random weights) on "
        f"packed web-like documents, {fastest['documents']:.1f} and {fastest['tokens_a_micro_batch']:,.0f} tokens a "
        "micro-batch:"
    )
    yield ""
    yield from table("setting", found.speeds, SPEED_COLUMNS)
    yield ""
    yield "A step of one micro-batch:"
    yield ""
    profiles = [row for row in found.rows("speed") if row["name"].startswith("profile of ")]
    yield from table(
        "setting", [{**row, "name": row["name"].removeprefix("profile of ")} for row in profiles], PROFILE_COLUMNS
    )
    yield ""
    top = found.row("speed", f"profile of {fastest['name']}").get("top", [])[:TOP]
    if top:
        yield f"Kernels of {fastest['name']}, a step of one micro-batch:"
        yield ""
        columns = {"ms": ("ms", "{:.2f}"), "calls": ("count", "{:,}")}
        yield from table(
            "kernel", [{**row, "name": f"`{row['kernel'][:100]}`".replace("|", "/")} for row in top], columns
        )
        yield ""
    if segments := list(found.rows("segments")):
        columns = {"forward, ms": ("forward_ms", "{:.3f}"), "forward and backward, ms": ("both_ms", "{:.3f}")}
        documents = segments[0]["documents"]
        yield f"torch's varlen attention over the {documents} documents of a micro-batch, 16 heads of 128:"
        yield ""
        yield from table("segments", segments, columns)
        yield ""


def _memory_lines(found: Found) -> Iterator[str]:
    if rows := list(found.rows("memory")):
        yield f"The memory estimate against the measured peak, {len(rows)} settings:"
        yield ""
        columns = {
            "estimated, MiB": ("estimated_mib", "{:,.0f}"),
            "measured": ("measured_mib", "{:,.0f}"),
            "ratio": ("ratio", "{:.3f}"),
        }
        yield from table("setting", rows, columns)
        yield ""
    if beside := found.row("machine", "context"):
        yield (
            f"Beside tensors: context {beside['context_gib']:.2f} GiB, NCCL with one rank "
            f"{found.row('machine', 'nccl').get('nccl_gib', math.nan):.2f} GiB; the allocator held up to "
            f"{_fragmentation(found) or 0:.1%} more than it had given out."
        )
        yield ""


def _parity_lines(found: Found) -> Iterator[str]:
    """The largest difference from each reference, a row for each engine and kernel."""
    engines = [*found.rows("engine"), *found.rows("compile")]
    if engines:
        steps = found.row("reference", "CPU, fp32").get("steps", 50)
        yield f"Losses of {steps} steps of a tiny model against the CPU's in float32, largest difference in nats:"
        yield ""
        yield from table("run", engines, {"difference": ("largest_difference", "{:.1e}"), "bound": ("bound", "{:g}")})
        yield ""
    kernels = [*found.rows("attention"), *found.rows("loss")]
    errors = [(row["name"], max(found)) for row in kernels if (found := [*_errors(row)])]
    if errors:
        yield "Kernels against their references, largest relative error of results and gradients:"
        yield ""
        yield from table(
            "kernel", [{"name": name, "error": error} for name, error in errors], {"error": ("error", "{:.1e}")}
        )
        yield ""


def _errors(row: Row) -> Iterator[float]:
    return (value for name, value in row.items() if isinstance(value, float) and name != "bound")


def table(first: str, rows: Iterable[Row], columns: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """A Markdown table. `columns`: head → key of the rows and format; a dash where a row has none."""
    yield f"| {' | '.join([first, *columns])} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for row in rows:
        cells = ("-" if row.get(key) is None else shape.format(row[key]) for key, shape in columns.values())
        yield f"| {' | '.join([row['name'], *cells])} |"


def _why(part: Mapping[str, Any]) -> str:
    wrong = [row["name"] for row in part["rows"] if not row["ok"]]
    return part["problem"] or "; ".join(wrong)


def _fragmentation(found: Found) -> float | None:
    return max((row["fragmentation"] for row in found.speeds if "fragmentation" in row), default=None)


def _context(found: Found) -> float | None:
    """GiB beside the allocator's: of runs, which have loaded all their kernels."""
    return max((row["beside_allocator_gib"] for row in found.speeds if "beside_allocator_gib" in row), default=None)


def _up(value: float, step: float) -> float:
    """`value` rounded up to a multiple of `step`: an estimate errs on the safe side."""
    return round(math.ceil(value / step - 1e-9) * step, 6)


def constants(found: Found) -> Iterator[str]:
    """The constants of ds_encdec/memory/estimate.py and docs/memory.md that the figures replace, rounded up."""
    if (context := _context(found)) is not None:
        yield f"CUDA_CONTEXT_BYTES = {_up(context, 0.05):g} * GIB  # measured: {context:.2f} GiB ({found.measured_on})"
    if (share := _fragmentation(found)) is not None:
        yield f"FRAGMENTATION = {_up(share, 0.005):g}  # measured: {share:.1%} ({found.measured_on})"
    if found.row("machine", "nccl").get("ranks", 1) < 2:
        yield "NCCL_BYTES stays an assumption: one rank has no channels to others"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what check.sh has written, or its folder")
    options = parser.parse_args()
    path = options.json / "gpu.json" if options.json.is_dir() else options.json
    found = Found(json.loads(path.read_text()))
    print(section(found))
    if found.dry_run:
        print("A dry run: nothing follows from it.")
    else:
        print("For ds_encdec/memory/estimate.py and docs/memory.md:", *constants(found), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
