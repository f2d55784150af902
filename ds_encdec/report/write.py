"""`ds-encdec report`: one page with pictures about a run, or a pipeline of phases, and the pictures as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_encdec.launch.disk import write_atomically
from ds_encdec.report.charts import charts_of
from ds_encdec.report.compare import compare_runs
from ds_encdec.report.page import render
from ds_encdec.report.phases_page import phase_charts, phase_folders, read_phases
from ds_encdec.report.read_run import Run, read_run
from ds_encdec.types import ConfigError


def write_report(
    path: Path, *, compare: Sequence[Path] = (), out: Path | None = None, png: bool = False
) -> tuple[Path, list[str]]:
    """Write the report of the run in `path`, or of the phases in it; returns the page and what to warn of.

    `compare`: further runs, whose curves are laid over this one's. `out`: the folder of the page, RUN/report by
    default; an earlier report in it is replaced. `png`: each chart lies beside the page as a picture, too.

    Raises ConfigError for a path that is no run or a folder that cannot be written, DataError for a run without
    metrics and for runs that cannot be compared.
    """
    paths = [one.expanduser() for one in (path, *compare)]
    folder = (paths[0] / "report" if out is None else out).expanduser()
    pipelines = [one for one in paths if phase_folders(one) and not (one / "metrics.jsonl").exists()]
    if pipelines and compare:
        raise ConfigError(
            f"{pipelines[0]} is the folder of a pipeline of phases, and --compare takes single runs: name one of its "
            f"phases, e.g. {phase_folders(pipelines[0])[-1]}."
        )
    try:
        if pipelines:
            return _write_phases(paths[0].resolve(), folder, png=png), []
        return _write_run([read_run(one) for one in paths], folder, png=png)
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {folder} ({error.strerror}); choose another folder.") from error


def _write_run(runs: Sequence[Run], folder: Path, *, png: bool) -> tuple[Path, list[str]]:
    folder.mkdir(parents=True, exist_ok=True)  # before the time is spent on drawing
    pictures = folder if png else None
    comparison = compare_runs(runs, pictures) if len(runs) > 1 else None
    charts, empty = charts_of(runs[0], pictures)
    page = render("run.html.j2", run=runs[0], comparison=comparison, charts=charts, empty=empty)
    return _write(folder, page), comparison.warnings if comparison else []


def _write_phases(root: Path, folder: Path, *, png: bool) -> Path:
    notes: list[str] = []
    phases = read_phases(root, notes)
    folder.mkdir(parents=True, exist_ok=True)
    for phase in phases:
        if phase.run:
            _write_run([phase.run], folder / phase.name, png=png)
    judged = [phase.verdict for phase in phases if phase.verdict is not None]
    charts = phase_charts(phases, folder if png else None)
    return _write(folder, render("phases.html.j2", root=root, phases=phases, judged=judged, notes=notes, charts=charts))


def _write(folder: Path, text: str) -> Path:
    # JSON may hold halves of surrogate pairs, which no encoding has.
    write_atomically(folder / "index.html", text.encode("utf-8", "replace"))
    return folder / "index.html"
