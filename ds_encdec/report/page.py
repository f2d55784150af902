"""Make a page from the templates (`*.html.j2`), and write numbers, times and configurations as text. The values come
from files that may hold anything: everything is escaped, and every type has a text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from ds_encdec.base.quantities import count, disk_size, duration
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.settings import leaves, show
from ds_encdec.launch.disk import write_atomically
from ds_encdec.monitor.metrics_file import is_number
from ds_encdec.report.read_run import Entry, Run, read_time

NOTHING = "–"  # text for a missing value
MAX_EVENTS = 200  # most rows of the table of events, the newest ones; all are in ledger.jsonl
MAX_EXCERPT = 1500  # most characters of a generated text that are shown
_LAST = itemgetter(-1)


def write_page(folder: Path, template: str, **values: Any) -> Path:
    """Write the page that `template` makes of `values` to index.html in `folder`; return its path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters = (number, count, disk_size, when, excerpt, flat, outcomes, events, changes)
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals["nothing"] = NOTHING
    write_atomically(folder / "index.html", environment.get_template(template).render(values))
    return folder / "index.html"


def number(value: object, unit: str = "", digits: int = 4) -> str:
    """Return a number with `digits` significant digits and its unit; `NOTHING` for None, other values as they are."""
    if not is_number(value):
        return ("" if value is None else str(value)) or NOTHING
    is_tiny = 0 < abs(value) < 1e-3
    text = power_of_ten(value, digits) if is_tiny else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return f"{text}{'' if unit in ('', '%') else ' '}{unit}"


def power_of_ten(value: float, digits: int = 4) -> str:
    """Return a number as `5×10⁻⁴`; 0 as it is."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{float(mantissa):g}×10{raised}"


def when(written: object) -> str:
    """Return a time of run.json or the events in readable form, with its zone; empty for anything else."""
    return f"{time:%Y-%m-%d %H:%M:%S %z}" if (time := read_time(written)) else ""


def excerpt(text: object) -> str:
    """Return the beginning of a text that a model may have made."""
    whole = number(text)
    return whole if len(whole) <= MAX_EXCERPT else f"{whole[:MAX_EXCERPT]}…"


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings by readable names, times and sizes in readable form."""
    for name, value in values.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{label} ")
        elif label.endswith(" bytes") and is_number(value):
            yield label.removesuffix(" bytes"), number(value / 2**30, "GiB")
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif value not in (None, ""):
            yield label, when(value) or str(value)


def outcomes(run: Run) -> list[tuple[str, str]]:
    """Return the results of the run: names, and numbers with their units."""
    begin = read_time(next((entry.get("time") for entry in run.entries("start")), run.status.get("started_at")))
    end = read_time(run.status.get("updated_at")) if run.status.get("state") != "running" else None
    took = run.curve("perf/step_time_s")
    began = next((entry["step"] for entry in run.entries("start")), 0.0)  # above 0 if it continues another run
    stepping = float(np.nansum(took.values * np.diff(took.steps, prepend=began)))

    def figure(how: Callable[[np.ndarray], Any], metric: str, unit: str = "", digits: int = 4, scale: float = 1) -> str:
        known = run.curve(metric).known
        return number(float(how(known)) * scale if len(known) else None, unit, digits)

    return [
        ("state", number(run.status.get("state"))),
        ("steps", number(run.steps)),
        ("skipped steps", number(run.skipped_steps)),
        ("alerts", number(len(run.entries("alert")))),
        ("rollbacks", number(len(run.entries("rollback")))),
        ("tokens seen", figure(_LAST, "train/tokens_seen")),
        ("rows that could not be read", figure(_LAST, "data/bad_rows")),
        ("examples that were too long", figure(_LAST, "data/long_rows")),
        ("last loss", figure(_LAST, "train/loss", digits=5)),
        ("lowest loss", figure(np.min, "train/loss", digits=5)),
        ("last eval loss", figure(_LAST, "eval/loss", digits=5)),
        ("lowest eval loss", figure(np.min, "eval/loss", digits=5)),
        ("throughput, median", figure(np.median, "perf/tokens_per_sec", "tokens/s")),
        ("MFU, median", figure(np.median, "perf/mfu", "%", scale=100)),
        # Time spent on the steps of the history, without evaluations, saves, restarts and abandoned branches.
        ("time in training steps", duration(stepping) if stepping else NOTHING),
        # With the pauses between restarts; nothing for a run without an end.
        ("from first start to end", duration((end - begin).total_seconds()) if begin and end else NOTHING),
    ]


def events(run: Run) -> tuple[list[Entry], int]:
    """Return the newest events, the last one first, and the number of older ones."""
    shown = [one for one in reversed(run.events) if one["kind"] != "start" or one.get("resumed_from")]
    return shown[:MAX_EVENTS], max(0, len(shown) - MAX_EVENTS)


def changes(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the fields of `config` that are not at their defaults, by section: name, value and default as text."""
    rows = differences([FullConfig().model_dump(mode="json"), config]) if config else []
    changed = [(name, value, default) for name, (default, value) in rows if value != NOTHING]
    return [(section, list(rows)) for section, rows in groupby(changed, lambda row: row[0].split(".")[0])]


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the fields that differ between `configs`, except the output folder, each with its values as text."""
    flattened = [dict(leaves(config)) for config in configs]
    order = {section: index for index, section in enumerate(FullConfig.model_fields)}
    names = dict.fromkeys(name for values in flattened for name in values if name != "infra.output_dir")
    rows = [(name, [show(values[name]) if name in values else NOTHING for values in flattened]) for name in names]
    # A field that is a mapping in one and null in another is shown by the fields of the mapping.
    found = [
        (name, shown)
        for name, shown in rows
        if len(set(shown)) > 1 and not any(other.startswith(f"{name}.") for other in names)
    ]
    return sorted(found, key=lambda row: order.get(row[0].split(".")[0], len(order)))
