"""The sections of one run's page: what it is, how it went, its charts and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from ds_encdec.monitor.metrics_file import is_number
from ds_encdec.report.charts import Chart, back_to, number
from ds_encdec.report.config_table import changes_from_defaults
from ds_encdec.report.markup import Html, element, facts, field_name, items, join, paragraph, section, table
from ds_encdec.report.read_run import Entry, Run, SavedCheckpoint
from ds_encdec.report.refusals import refused_alerts

MAX_EVENTS = 200
"""Rows of the table of events, the newest ones; all are in ledger.jsonl."""
_STATE_LEVEL = {"completed": "ok", "running": "warn", "preempted": "warn", "failed": "bad"}


def header(run: Run) -> Html:
    """Name, state, verdict and the run in numbers."""
    state = str(run.status.get("state", "state unknown"))
    badge = element("span", state, class_=f"state {_STATE_LEVEL.get(state, 'muted')}")
    return join(
        [
            element("h1", join([run.name, badge])),
            paragraph(element("code", str(run.path)), class_="muted"),
            items([element("span", words, class_=level) for level, words in verdict(run)], class_="verdict"),
            facts([pair for pair in _numbers(run) if pair[1] is not None]),
            items([element("span", note, class_="muted") for note in run.notes]),
        ]
    )


def verdict(run: Run) -> Iterator[tuple[str, str]]:
    """How the run went: (ok | warn | bad, a sentence)."""
    yield _ending(run)
    rollbacks = run.entries("rollback")
    if rollbacks:
        lost = int(sum(entry["step"] - back_to(entry) for entry in rollbacks))
        yield "warn", f"! {count(len(rollbacks), 'rollback')}, which took back {count(lost, 'step')}."
    if refusals := len(run.entries("no_rollback")):
        yield "warn", f"! {count(refusals, 'rollback')} refused: no checkpoint was old enough."
    alerts = Counter(str(entry.get("type", "unknown")) for entry in run.entries("alert"))
    if alerts:
        named = ", ".join(f"{kind} {times:,}" for kind, times in alerts.most_common())
        yield "warn", f"! {count(alerts.total(), 'alert')}: {named}."
    if run.skipped_steps:
        yield "warn", f"! {count(run.skipped_steps, 'step')} skipped."
    if not rollbacks and not alerts and not run.skipped_steps and run.status.get("state") != "failed":
        yield "ok", "✓ No alerts, no rollbacks, no skipped steps."
    for entry in (*run.entries("early_stop"), *run.entries("stop")):
        if entry.get("message") != run.status.get("reason"):  # the last one, told above
            yield "warn", f"! Stopped at step {entry['step']:,}: {entry.get('message', 'no reason given')}"
    if run.verdict is not None:
        yield gate(run.verdict)


def _ending(run: Run) -> tuple[str, str]:
    state, planned = run.status.get("state"), run.number("training.num_train_steps")
    where = f"step {run.steps:,}" + (f" of {planned:,.0f}" if planned else "")
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    if state == "completed":
        return "ok", f"✓ Completed at {where}."
    if state == "failed":
        return "bad", f"✗ Failed after {where}, exit code {run.status.get('exit_code')}{reason}"
    if state == "preempted":
        return "warn", f"! Stopped after {where}, can be resumed{reason}"
    return "warn", f"! At {where}; running, or killed outright: such a run cannot say so."


def gate(result: Entry) -> tuple[str, str]:
    """A phase's verdict: (ok | bad, a sentence)."""
    name = result.get("phase", "phase")
    if result.get("passed") is True:
        return "ok", f"✓ The gate of {name} was passed."
    failed = "; ".join(str(check.get("message")) for check in checks(result) if check.get("passed") is not True)
    return "bad", f"✗ The gate of {name} was not passed: {failed or 'no check says why'}."


def checks(result: Entry) -> list[Mapping[str, Any]]:
    """The checks of a phase's verdict."""
    listed = result.get("checks")
    return [check for check in listed if isinstance(check, dict)] if isinstance(listed, list) else []


def _numbers(run: Run) -> Iterator[tuple[str, str | None]]:
    yield "steps", f"{run.steps:,}"
    yield "tokens seen", _show(run.last("train/tokens_seen"), "{:,.0f}")
    yield "last loss", _show(run.last("train/loss"), "{:.4f}")
    yield "lowest loss", _show(run.lowest("train/loss"), "{:.4f}")
    yield "last eval loss", _show(run.last("eval/loss"), "{:.4f}")
    yield "lowest eval loss", _show(run.lowest("eval/loss"), "{:.4f}")
    yield "tokens/s, median", _show(median(run, "perf/tokens_per_sec"), "{:,.0f}")
    yield "MFU, median", _show(median(run, "perf/mfu"), "{:.1%}")
    yield "from first start to end", _show_duration(wall_seconds(run))
    yield "time in training steps", _show_duration(run.training_seconds or None)
    yield "engine", engine(run)
    yield "ranks", _show(run.status.get("world_size"), "{}")


def engine(run: Run) -> str:
    """Engine and sharding: as the ledger says, or the newest checkpoint, or else as configured."""
    manifests = [saved.manifest.engine for saved in run.checkpoints if saved.manifest]
    started = [str(entry["engine"]) for entry in run.entries("start") if entry.get("engine")]
    name = [str(run.setting("infra.distributed_type", "unknown")), *manifests, *started][-1]
    return f"{name}, {run.setting('infra.sharding_stage', 'sharding unknown')}"


def median(run: Run, metric: str) -> float | None:
    """The median of the metric's finite values."""
    known = run.curve(metric).known
    return float(np.median(known)) if len(known) else None


def wall_seconds(run: Run) -> float | None:
    """Seconds from the first start to the end, pauses between restarts included; None for a run without an end."""
    starts = [entry.get("time") for entry in run.entries("start")]
    begin, end = _time(starts[0] if starts else run.status.get("started_at")), _time(run.status.get("updated_at"))
    return (end - begin).total_seconds() if begin and end and run.status.get("state") != "running" else None


def _time(written: object) -> datetime | None:
    try:
        return datetime.strptime(str(written), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def _when(written: object) -> str:
    """A time as one reads it, with its zone."""
    time = _time(written)
    return f"{time:%Y-%m-%d %H:%M:%S %z}" if time else ""


def show_seconds(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {seconds % 60:.0f} s"


def _show_duration(seconds: float | None) -> str | None:
    return None if seconds is None else show_seconds(seconds)


def _show(value: Any, form: str) -> str | None:
    return None if value is None else form.format(value)


def count(how_many: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{how_many:,} {noun}" + ("" if how_many == 1 else "s")


def figure(chart: Chart, *, folder: str = "") -> Html:
    """A chart with its key figures and a link to its PNG, which lies in `folder` beside the page."""
    drawing = Html(chart.narrow.svg)
    if chart.wide is not None:
        narrow = element("div", Html(chart.narrow.svg), class_="narrow")
        drawing = join([element("div", Html(chart.wide.svg), class_="wide"), narrow])
    link = element("a", "PNG", href=f"{folder}{chart.key}.png", aria_label=f"{chart.title} as PNG")
    caption = element("figcaption", Html(f"{element('span', chart.caption)} · {link}"))
    return element("figure", join([drawing, caption]), **({"class_": "full"} if chart.wide else {}))


def charts_section(charts: Sequence[Chart], empty: Sequence[str]) -> Html:
    """All charts, and in one line what there was nothing to draw of."""
    missing = [paragraph(f"Nothing was logged for: {', '.join(empty)}.", class_="muted")] if empty else []
    return section("Charts", element("div", join(figure(chart) for chart in charts), class_="charts"), *missing)


def tables(run: Run) -> Html:
    """Events, the gate, configuration, environment and checkpoints."""
    return join([_events(run), _gate(run), _configuration(run), _environment(run), _checkpoints(run)])


def _events(run: Run) -> Html:
    refused = refused_alerts(run.events)
    told = [
        (entry, index in refused)
        for index, entry in enumerate(run.events)
        if entry["kind"] != "start" or entry.get("resumed_from")
    ]
    if not told:
        return section("Alerts and rollbacks", paragraph("There were none."))
    rows = [
        (f"{entry['step']:,}", *_event(entry, is_refused), _when(entry.get("time")))
        for entry, is_refused in reversed(told[-MAX_EVENTS:])
    ]
    older = len(told) - len(rows)
    more = [paragraph(f"{count(older, 'older event')} in ledger.jsonl.", class_="muted")] if older else []
    columns = ("step", "event", "what", "done about it", "time")
    return section("Alerts and rollbacks", table("Alerts and rollbacks", columns, rows), *more)


def _event(entry: Entry, is_refused: bool) -> tuple[str, str, str]:
    """What it was, its message, and what was done. `is_refused`: it is an alert whose rollback was refused."""
    kind, message = str(entry["kind"]), str(entry.get("message", ""))
    if kind == "start":
        return "restart", f"resumed from {entry.get('resumed_from')}", ""
    if kind == "alert":
        done = "no rollback: no checkpoint old enough" if is_refused else str(entry.get("action", ""))
        return str(entry.get("type", "alert")), message, done
    if kind == "no_rollback":
        return "rollback refused", message, "training went on"
    if kind == "rollback":
        begin, end = entry.get("to_data_step"), entry.get("data_step")
        done = f"back to step {entry.get('to_step')}; the data between steps {begin} and {end} is not used again"
        return f"rollback {entry.get('number', '')}", message, done
    return kind, message, "run ended" if kind in ("stop", "early_stop") else ""


def _gate(run: Run) -> Html:
    return section("Gate", verdict_table([run.verdict])) if run.verdict is not None else Html()


def verdict_table(results: Sequence[Entry]) -> Html:
    """A row for each phase's verdict."""
    rows = [
        (
            result.get("phase", "unknown"),
            element("span", "✓ passed", class_="ok")
            if result.get("passed") is True
            else element("span", "✗ not passed", class_="bad"),
            items(
                [f"{'✓' if check.get('passed') is True else '✗'} {check.get('message')}" for check in checks(result)]
            ),
            *(_cell(result.get(name)) for name in ("steps", "tokens_seen")),
            *(_when(result.get(name)) for name in ("started", "ended")),
        )
        for result in results
    ]
    return table("Phases", ("phase", "gate", "checks", "steps", "tokens", "started", "ended"), rows, stacked=True)


def _cell(value: object) -> str:
    if is_number(value):
        return number(value)
    return "" if value is None else str(value)


def _configuration(run: Run) -> Html:
    title = "Configuration that is not the default"
    changes = changes_from_defaults(run.config) if run.config else []
    if not changes:
        return section(title, paragraph("None." if run.config else "config.yaml is missing or cannot be read."))
    rows = [(field_name(change.name), change.value, change.default) for change in changes]
    unknown = [change.name for change in changes if not change.known]
    note = f"Fields that this version of ds_encdec does not know (another one wrote them): {', '.join(unknown)}."
    return section(
        title,
        table(title, ("field", "value", "default"), rows),
        *([paragraph(note, class_="warn")] if unknown else []),
    )


def _environment(run: Run) -> Html:
    told = [(name, value) for name, value in flat(run.status) if name not in ("state", "reason")]
    return section("Environment", facts(told) if told else paragraph("run.json is missing or cannot be read."))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of nested mappings by readable names, times as one reads them."""
    for name, value in values.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, f"{label} ")
        elif value not in (None, ""):
            yield label, _when(value) or str(value)


def _checkpoints(run: Run) -> Html:
    if not run.checkpoints:
        return section("Checkpoints", paragraph("There are none in checkpoints/."))
    columns = ("step", "is", "size", "engine", "ranks", "files")
    return section(
        "Checkpoints",
        table("Checkpoints", columns, [_checkpoint(saved) for saved in reversed(run.checkpoints)]),
        paragraph(
            join(
                [
                    "File names are compared with the manifest here;",
                    element("code", "ds-encdec verify RUN"),
                    "compares the content of every file with its SHA-256.",
                ]
            ),
            class_="muted",
        ),
    )


def _checkpoint(saved: SavedCheckpoint) -> Sequence[object]:
    if saved.manifest is None:
        return (f"{saved.step:,}", ", ".join(saved.pointers), "", "", "", element("span", saved.damage, class_="bad"))
    files = f"all {len(saved.manifest.files):,} there"
    return (
        f"{saved.step:,}",
        ", ".join(saved.pointers),
        f"{saved.manifest.num_bytes / 1e9:.3f} GB",
        saved.manifest.engine,
        saved.manifest.world_size,
        element("span", saved.damage, class_="bad") if saved.damage else files,
    )
