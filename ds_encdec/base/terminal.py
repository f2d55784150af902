"""Shows what a program of ours says: its log and its progress, through one console, and its errors.

On a terminal log lines stand above the progress bar. Elsewhere each line begins with its time, level and, where several
ranks write, rank. Only the programs set this up: who imports the package has a log of their own.

The reader of a program's output may leave before its end, as in `ds-encdec plan | head -1`. For most verbs that is the
end: nobody wants the rest. A training goes on without: what it is for is in its folder.
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import os
import select
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}
_ERASED_LINE = "\r\x1b[K"


def console(*, stderr: bool = False) -> Console:
    """The console that log and progress share, on standard output; with `stderr` there, unless the other is a terminal.

    NO_COLOR is rich's to honour.
    """
    return _console(stderr and not is_terminal(sys.stdout))


@functools.cache
def _console(stderr: bool) -> Console:
    from rich.console import Console  # not for --help

    stream = sys.stderr if stderr else sys.stdout
    if is_terminal(stream):
        return Console(stderr=stderr)
    # FORCE_COLOR would draw bars into files.
    return Console(stderr=stderr, force_terminal=False if stream.isatty() else None, force_interactive=False)


def is_terminal(stream: TextIO) -> bool:
    """Return whether somebody reads `stream` on a terminal. Open MPI gives ranks one that may end in a file."""
    return stream.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ


def log_to_terminal(
    options: argparse.Namespace, level: int = logging.WARNING, *, rank: int = 0, ranks: int = 1
) -> None:
    """Send the log of this process, one of `ranks`, where its user looks; other ranks than 0 only warn.

    `level` is what is shown without the `options` of `VERBOSITY`.
    """
    quiet, verbose = getattr(options, "quiet", False), getattr(options, "verbose", False)
    if quiet:
        level = logging.WARNING if level < logging.WARNING else logging.ERROR
    elif verbose:
        level = min(level, logging.INFO)
    elif rank:
        level = max(level, logging.WARNING)
    root = logging.getLogger()
    if (earlier := _handler()) is not None:
        root.removeHandler(earlier)
    root.addHandler(TerminalHandler(rank, ranks, ["--quiet"] * quiet + ["--verbose"] * verbose))
    root.setLevel(level)
    logging.getLogger("ds_encdec").setLevel(logging.DEBUG if verbose else logging.NOTSET)


def _handler() -> TerminalHandler | None:
    """The handler that a program of ours has set up, if it has."""
    return next((one for one in logging.getLogger().handlers if isinstance(one, TerminalHandler)), None)


class TerminalHandler(logging.Handler):
    """Writes log records for people, and for files that keep what people would see; see the module."""

    def __init__(self, rank: int, ranks: int, asked: Sequence[str]) -> None:
        super().__init__()
        self.rank, self.ranks, self.asked = rank, ranks, asked

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            text = self.format(record)
            label = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            if not _is_watched():
                print(self.stamped(text, record.levelname), file=sys.stderr, flush=True)
            elif self.rank:  # another process holds the bar, and draws it anew on the next line
                print(f"{_ERASED_LINE}rank {self.rank}: {label}{text}", file=sys.stderr, flush=True)
            else:
                from rich.text import Text

                console().print(Text.assemble((label, _STYLES.get(record.levelno, "")), text))
        except Exception:
            self.handleError(record)

    def stamped(self, text: str, level: str) -> str:
        """A line of a file, which says when and, among several ranks, who."""
        who = f" rank {self.rank}" if self.ranks > 1 else ""
        return f"{datetime.now():%Y-%m-%d %H:%M:%S} {level}{who}: {text}"


def verbosity() -> Sequence[str]:
    """The options of `VERBOSITY` that this program was given, for one that it starts."""
    return () if (handler := _handler()) is None else handler.asked


def is_quiet() -> bool:
    """Return whether progress is to be left out."""
    return "--quiet" in verbosity()


def _is_watched() -> bool:
    """Return whether all that this program says is on a terminal."""
    return is_terminal(sys.stdout) and is_terminal(sys.stderr)


def stamped(line: str) -> str:
    """A line of progress as the log would write it: as it is on a terminal, and where no program has set up the log."""
    return line if (handler := _handler()) is None or _is_watched() else handler.stamped(line, "INFO")


def take_over(name: str, harmless: Collection[str] = ()) -> None:
    """Let the logger of a library that prints by itself log like everybody else, without the `harmless` messages.

    Where no program has set up the log, only these messages are left out.
    """
    library = logging.getLogger(name)
    library.addFilter(lambda record: record.getMessage() not in harmless)
    if _handler() is not None:
        library.handlers.clear()
        library.propagate = True


def print_marked(text: str, styles: Mapping[str, str]) -> None:
    """Print `text`, on a terminal with what the regular expressions in `styles` match in that style."""
    if not is_terminal(sys.stdout):
        print(text)
        return
    from rich.text import Text

    marked = Text(text)
    for pattern, style in styles.items():
        marked.highlight_regex(pattern, style)
    console().print(marked, soft_wrap=True)


def print_error(error: Exception) -> None:
    """Say why the program ends, on standard error; on a terminal in colour, and with the lines that are wrong."""
    if not is_terminal(sys.stderr):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    from ds_encdec.base.marked_errors import marked

    shown = Console(stderr=True)
    shown.print(Text.assemble(("error:", "bold red"), " ", marked(str(error), shown.width)), soft_wrap=True)


@contextmanager
def libraries_print_to_stderr() -> Iterator[TextIO]:
    """Inside, whatever libraries print goes to standard error; standard output is yielded, for the answer."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield stdout


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Inside, output that nobody reads any more ends the process, and well: `| head` has what it wanted."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        stdout = sys.stdout.fileno()
        poll = select.poll()
        poll.register(stdout, 0)
        if not poll.poll(0):  # another pipe
            raise
        # Python flushes once more when it exits (https://docs.python.org/3/library/signal.html#note-on-sigpipe).
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
        raise SystemExit(0) from None


def outlive_readers() -> None:
    """From now on what is printed is dropped where nobody takes it: `| head`, a killed `tee`, a terminal that closed.

    Of the whole process, at its file descriptors: libraries print, too, log, and flush once more at the exit. Streams
    that are not the process's own (a test's, a notebook's) are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError):
                stream.flush()
            file = _Output(stream.fileno(), "w", closefd=False)
            buffered = file if stream.write_through else io.BufferedWriter(file)  # Python's own has none with -u
            kept = ("encoding", "errors", "line_buffering", "write_through")
            options = {option: getattr(stream, option) for option in kept}
            setattr(sys, name, io.TextIOWrapper(buffered, **options))


class _Output(io.FileIO):
    """Takes whatever is written, also where the file does not."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # the reader is gone, the terminal, the disk is full
            return len(data)
