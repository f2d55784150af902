"""Send metrics to metrics.jsonl and the console always, and to TensorBoard and W&B as configured. A sink receives a
step and plain floats; only rank 0 has any. A tracker that fails is dropped with one warning, and the run goes on.
metrics.jsonl is never dropped: each line that cannot be written is an error in the log."""

import logging
import math
import netrc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ds_encdec.base import terminal
from ds_encdec.base.plugins import load_plugin
from ds_encdec.base.quantities import duration
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.disk import write_atomically
from ds_encdec.launch.run_folder import RunFolder
from ds_encdec.monitor.metrics_file import append_line, cut_after

logger = logging.getLogger(__name__)

# Seconds for W&B's server to answer before the run is kept offline. Training has not begun then.
WANDB_INIT_TIMEOUT_S = 30.0


class Sample(NamedTuple):
    """One held-out example with the text that the model generated for it."""

    input: str
    reference: str
    prediction: str


class Sink:
    """Takes the metrics of a step. Steps decrease only by `go_back`; one may come twice (training, evaluation)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write `metrics` of the applied optimizer step `step`."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Write texts that the model has generated in the evaluation at `step`."""

    def go_back(self, step: int, rollback: int) -> None:
        """Take back the steps after `step`; `rollback` is the number of the run's rollback."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and close. `exit_code` is the run's."""


def open_sinks(config: FullConfig, run_dir: Path, *, rank: int, start_step: int = 0) -> list[Sink]:
    """Return the sinks of a run whose next step is `start_step` + 1; none on ranks other than 0. Later steps of a
    resumed run are cut from metrics.jsonl and hidden from TensorBoard. Raises OSError if metrics.jsonl cannot be
    opened."""
    if rank != 0:
        return []
    training, logging_dir, folder = config.training, run_dir / config.infra.logging_dir, RunFolder(str(run_dir))
    files: list[Sink] = [JsonlSink(folder.metrics, start_step=start_step)]
    if training.eval_generate_samples:
        files.append(SamplesSink(folder.samples, start_step=start_step))

    def open_tracker(name: str) -> Sink:
        if name == "console":
            return ConsoleSink(training.num_train_steps, start_step=start_step, best=training.metric_for_best_model)
        if name == "tensorboard":
            return TensorBoardSink(logging_dir / name, config, start_step=start_step)
        if name == "wandb":
            return WandbSink(logging_dir, config)
        sink: Sink = load_plugin("training.report_to", name, "sinks")(config, logging_dir, start_step)
        return sink

    names = dict.fromkeys([*["console"] * (not terminal.is_quiet()), *training.report_to])
    return [*files, *(GuardedSink(name, partial(open_tracker, name)) for name in names)]


def _guarded(method: str) -> Callable[..., None]:
    def forward(self: "GuardedSink", *values: Any) -> None:
        if self.sink is not None:
            self.attempt(getattr(self.sink, method), *values)

    return forward


class GuardedSink(Sink):
    """A sink whose failure costs one warning and the sink, never the run. Once it has failed, it does nothing."""

    def __init__(self, name: str, opener: Callable[[], Sink]) -> None:
        self._name = name
        self.sink: Sink | None = self.attempt(opener)

    log = _guarded("log")
    show = _guarded("show")
    go_back = _guarded("go_back")
    close = _guarded("close")

    def attempt(self, action: Callable[..., Any], *values: Any) -> Any:
        """Call `action`; if it raises, drop the sink."""
        try:
            return action(*values)
        except KeyboardInterrupt:  # the second Ctrl-C
            raise
        except BaseException as error:  # whatever a tracker raises: rich and wandb may raise SystemExit
            logger.warning("%s has failed and is dropped, training goes on: %r", self._name, error)
            self.sink = None


class JsonlSink(Sink):
    """Writes metrics.jsonl: one JSON object a line, `step` and the metrics by name; null for NaN and infinity. A torn
    line and lines of later steps than `start_step` are cut off at the start. A rollback moves lines to
    metrics.abandoned.jsonl, with its number."""

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        self._path = path
        path.touch()
        cut_after(path, start_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        append_line(self._path, {"step": step} | finite)

    def go_back(self, step: int, rollback: int) -> None:
        try:
            abandoned = self._path.with_name(f"{self._path.stem}.abandoned{self._path.suffix}")
            cut_after(self._path, step, aside=abandoned, rollback=rollback)
        except OSError as error:
            logger.error("%s: the metrics after step %d could not be put aside: %s", self._path, step, error)


class SamplesSink(JsonlSink):
    """Writes samples.jsonl: one generated text a line, with `step`; cut and moved like metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass  # the metrics are in the other file

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            append_line(self._path, {"step": step, **sample._asdict()})


# Label, metric and format of all that a line may show, in this order.
_SHOWN = (
    ("loss", "train/loss", "{:.4f}"),
    ("lr", "train/learning_rate", "{:.2e}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("skipped", "train/skipped_steps", "{:.0f}"),
    ("tokens/s", "perf/tokens_per_sec", "{:,.0f}"),
    ("MFU", "perf/mfu", "{:.1%}"),
    ("eval loss", "eval/loss", "{:.4f}"),
    ("perplexity", "eval/perplexity", "{:.2f}"),
    ("exact match", "eval/exact_match", "{:.1f} %"),
    ("ROUGE-L", "eval/rougeL", "{:.1f}"),
    ("chrF", "eval/chrf", "{:.1f}"),
    ("BLEU", "eval/bleu", "{:.1f}"),
)


def shown(metrics: Mapping[str, float], best: str = "loss") -> list[str]:
    """Return the metrics that a person watches, labelled, the most important first: `best`, then the others."""
    chosen = f"eval/{best}"
    of_sets = [name for name in metrics if re.fullmatch("eval/.+/loss", name)]
    rows = [*_SHOWN, *((f"{name.split('/')[1]} loss", name, "{:.4f}") for name in of_sets)]
    if all(name != chosen for _, name, _ in rows):
        rows.append((best, chosen, "{:.4g}"))
    known = [row for row in rows if row[1] in metrics and (metrics[row[1]] or row[1] != "train/skipped_steps")]
    known.sort(key=lambda row: row[1] != chosen)
    return [f"{label} {form.format(metrics[name])}" for label, name, form in known]


class ConsoleSink(Sink):
    """Shows a line at the bottom of a terminal, with step, bar, ETA and as many metrics as fit, else prints one line
    per logging interval. Evaluations are always printed."""

    def __init__(
        self, total_steps: int, *, start_step: int = 0, best: str = "loss", console: Console | None = None
    ) -> None:
        self._total_steps, self._step, self._best = total_steps, start_step, best
        self._metrics, self._eta = ["waiting for the first metrics"], ""
        self._console = console or terminal.console()
        self._live: Live | None = None
        if self._console.is_interactive:
            self._live = Live(self, console=self._console, refresh_per_second=2)
            self._live.start()
            self._console.show_cursor()  # a killed process could not restore it

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts, eta = shown(metrics, self._best), ""
        if "perf/step_time_s" in metrics:
            eta = f"ETA {duration((self._total_steps - step) * metrics['perf/step_time_s'])}"
        if "train/loss" in metrics and self._live is not None:
            self._step, self._metrics, self._eta = step, parts, eta or self._eta
            self._live.refresh()
        elif parts or eta:
            text = " | ".join(filter(None, [f"step {step}/{self._total_steps}", *parts, eta]))
            line = terminal.stamped(text) if self._live is None else text
            self._console.print(terminal.printable(line), markup=False, highlight=False, soft_wrap=True)

    def go_back(self, step: int, rollback: int) -> None:
        self._step = step

    def close(self, exit_code: int = 0) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        words = list(filter(None, [f"step {self._step}/{self._total_steps}", self._eta]))
        free = options.max_width - sum(len(word) + 1 for word in words)
        bar = max(8, min(40, free // 4))
        lines = [" | ".join(self._metrics[:count]) for count in range(len(self._metrics), -1, -1)]
        fitting = next((line for line in lines if len(line) <= free - bar - 1), "")
        head, *eta = (Text(word, style="bold") for word in words)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(head, ProgressBar(self._total_steps, self._step, width=bar), *eta, fitting)
        yield grid


class TensorBoardSink(Sink):
    """Writes event files with the metrics and the configuration. On resume the steps after `start_step` are hidden."""

    def __init__(self, directory: Path, config: FullConfig, *, start_step: int = 0) -> None:
        # Imported late: it costs half a second.
        from torch.utils.tensorboard import SummaryWriter

        self._open = lambda step: SummaryWriter(str(directory), purge_step=step + 1)
        self._writer = self._open(start_step)
        self._writer.add_text("configuration", indent(config.dump_yaml(), "    "), start_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar("train/data_step" if name == "data_step" else name, value, step)
        self._writer.flush()

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[escape(text).replace("|", "&#124;").replace("\n", "<br>") for text in one] for one in samples]
        lines = [Sample._fields, ["---"] * len(Sample._fields), *rows]
        self._writer.add_text("eval/samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self._writer.flush()

    def go_back(self, step: int, rollback: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()


class WandbSink(Sink):
    """A Weights & Biases run: online after a login, else offline with one warning. Its id is kept in
    `logging_dir`/wandb_run_id, so a resumed run continues it. The chart's x axis is our step, since W&B's cannot go
    back; after a rollback the abandoned branch stays beside the new one."""

    def __init__(self, logging_dir: Path, config: FullConfig) -> None:
        infra = config.infra
        logging_dir.mkdir(parents=True, exist_ok=True)
        self._run = _start_wandb(
            project=infra.wandb_project,
            entity=infra.wandb_entity,
            name=infra.wandb_run_name,
            id=_wandb_run_id(logging_dir),
            config=config.model_dump(mode="json"),
            dir=os.environ.get("WANDB_DIR") or str(logging_dir),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        table = wandb.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"step": step, "eval/samples": table})

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)


def _wandb_run_id(logging_dir: Path) -> str:
    """Return WANDB_RUN_ID, or the whole id that an earlier start kept, or a new one, and keep it. Raises OSError."""
    kept, earlier = logging_dir / "wandb_run_id", ""
    with suppress(OSError, ValueError):
        earlier = kept.read_text().strip()
    run_id = os.environ.get("WANDB_RUN_ID") or (re.fullmatch(r"[\w.-]+", earlier) or [os.urandom(4).hex()])[0]
    if run_id != earlier:
        write_atomically(kept, run_id + "\n")
    return run_id


def _start_wandb(**arguments: Any) -> Any:
    # Imported late: half a second, and only rank 0 of runs that report to W&B needs it.
    import wandb

    # The library's own output would garble the progress bar; it stays in its log files.
    settings = wandb.Settings(silent=True, console="off", init_timeout=WANDB_INIT_TIMEOUT_S)
    if "WANDB_MODE" not in os.environ and not has_wandb_login(wandb.Settings().base_url):
        logger.warning("W&B: no login was found; this run is kept offline in %s. Use `wandb login`", arguments["dir"])
        return wandb.init(mode="offline", settings=settings, **arguments)
    try:
        return wandb.init(settings=settings, **arguments)
    except Exception as error:  # no network, a refused key, a server's answer
        logger.warning("W&B: no connection, this run is kept offline in %s: %s", arguments["dir"], error)
        wandb.teardown()  # frees the run id
        return wandb.init(mode="offline", settings=settings, **arguments)


def has_wandb_login(base_url: str = "https://api.wandb.ai") -> bool:
    """Return whether W&B finds credentials without a prompt, which would stop an unattended run."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", base_url)).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
