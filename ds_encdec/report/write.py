"""`ds-encdec report`: one page with pictures about a run, or a pipeline of phases, and the pictures as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_encdec.launch.atomic_files import write_atomically
from ds_encdec.report.charts import Chart, charts_of
from ds_encdec.report.compare import compare_section
from ds_encdec.report.markup import Html, join, page
from ds_encdec.report.phases_page import phase_folders, phases_body, read_phases
from ds_encdec.report.read_run import Run, read_run
from ds_encdec.report.run_page import charts_section, header, tables
from ds_encdec.types import ConfigError


def write_report(path: Path, *, compare: Sequence[Path] = (), out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the report of the run in `path`, or of the phases in it; returns the page and what to warn of.

    `compare`: further runs, whose curves are laid over this one's. `out`: the folder of the page and the pictures,
    RUN/report by default; files of an earlier report in it are replaced.

    Raises ConfigError for a path that is no run or a folder that cannot be written, DataError for a run without
    metrics and for runs that cannot be compared.
    """
    path = path.expanduser()
    folder = (path / "report" if out is None else out).expanduser()
    others = [other.expanduser() for other in compare]
    if others:
        _require_single_runs([path, *others])
    elif _holds_phases(path):
        return _write_phases(path.resolve(), folder), []
    return _write_run(read_run(path), [read_run(other) for other in others], folder)


def _holds_phases(path: Path) -> bool:
    return bool(phase_folders(path)) and not (path / "metrics.jsonl").exists()


def _require_single_runs(paths: Sequence[Path]) -> None:
    for path in filter(_holds_phases, paths):
        raise ConfigError(
            f"{path} is the folder of a pipeline of phases, and --compare takes single runs: name one of its phases, "
            f"e.g. {phase_folders(path)[-1]}."
        )


def _write_run(run: Run, others: Sequence[Run], folder: Path) -> tuple[Path, list[str]]:
    _make(folder)
    comparison, compared, warnings = compare_section([run, *others]) if others else (Html(), [], [])
    charts, empty = charts_of(run)
    body = join([header(run), comparison, charts_section(charts, empty), tables(run)])
    return _write(folder, page(f"{run.name}: report", body), [*compared, *charts]), warnings


def _write_phases(root: Path, folder: Path) -> Path:
    notes: list[str] = []
    phases = read_phases(root, notes)
    _make(folder)
    for phase in phases:
        if phase.run:
            _write_run(phase.run, (), folder / phase.name)
    body, charts = phases_body(root, phases, notes)
    return _write(folder, page(f"{root.name}: report of the phases", body), charts)


def _make(folder: Path) -> None:
    """Make the folder of the report, before the time is spent on drawing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _write(folder: Path, text: str, charts: Iterable[Chart]) -> Path:
    """Put the page and its pictures into `folder`."""
    index = folder / "index.html"
    try:
        for chart in charts:
            (folder / f"{chart.key}.png").write_bytes((chart.wide or chart.narrow).png)
        write_atomically(index, text)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return index


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out: cannot write to {folder} ({error.strerror}); choose another folder.")
