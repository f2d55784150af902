"""Shows a program's log, progress and errors, on a terminal in colour. Log lines stand above the progress bar; outside
a terminal each has its time, level and, among several ranks, rank. Only programs set this up, not the import. If a
reader leaves early (`plan | head`), most verbs end, but a training goes on: its results are in its folder."""

from __future__ import annotations

import argparse
import functools
import io
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from ds_encdec.base.types import Interrupted, Preempted

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}
_ERASED_LINE = "\r\x1b[K"

# A pattern for a part of each name of a setting, option or variable with a secret, whose value is never printed.
# `num_tokens`, tokenizers and authors do not match.
SECRET = (
    r"secret|passw|passphrase|pass(?![a-z])|pwd|credential|auth(?!or(?!iz))|bearer|token(?!s|iz)"
    r"|key(?:[_-]?(?:id|file|path))?(?![\w.-])|(?<![a-z])sig(?:nature)?(?![a-z])"
)
# A URL's name with its password (of the web also a name alone, as tokens are written; a port is neither), and its
# parameters; of an address without its beginning, as in errors of requests, those that are named like secrets.
_URL_USER = re.compile(
    r"(?i)(?<=://)(?:[^@\s/]*:(?!\d*/)(?:(?!://)[^\s\"'])*|(?<=http://)[^@\s/]+|(?<=https://)[^@\s/]+)(?=@)"
)
_URL_SECRET = rf"([?&;#][\w.%-]*(?:{SECRET})[\w.%-]*=)[^&#;\s\"']+"
_URL_QUERY = re.compile(rf"(?i)(://[^\s?\"']*\?)[^\s\"'/=]*=[^\s\"']*|{_URL_SECRET}")
# What a terminal obeys, or shows as other text: escape sequences, other controls than line ends and tabs, marks of the
# direction of writing. Half of a surrogate pair, as in a name that is not UTF-8, could not be printed.
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# The report of a configuration's problems (config/settings.py): places, values and fixes.
_STYLES_OF_ERRORS = {
    "^error:": "bold red",
    r"(?m)^  \S.*?:\d+(:\d+)?(?=[ :])": "cyan",
    "(?m)(?<= = ).*$": "red",
    "`[^`\n]+`": "bold green",
}


def is_secret(name: str) -> bool:
    """Return whether `name` is the name of a secret, in any case."""
    return re.search(SECRET, name, re.IGNORECASE) is not None


def printable(text: str) -> str:
    """Return `text` for a terminal or a log: characters that a terminal obeys as escapes (`\\x1b`), and the secrets of
    its URLs as stars. Files keep what they are given."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], without_url_secrets(text))


def print_text(text: object, end: str = "\n", *, file: TextIO | None = None) -> None:
    """Print what others wrote, such as names and generated texts: to a terminal as `printable`, else as it is."""
    stream = file or sys.stdout
    print(printable(str(text)) if stream.isatty() else text, end=end, file=stream, flush=True)


def without_url_secrets(text: str) -> str:
    """Return `text` with stars for the passwords, names beside them, and parameters in its URLs."""
    return _URL_QUERY.sub(lambda found: f"{found[1] or found[2]}***", _URL_USER.sub("***", text))


def has_url_secret(text: str) -> bool:
    """Return whether a URL in `text` has a password, a name beside one, or a parameter that is named like a secret."""
    return bool(_URL_USER.search(text) or re.search(_URL_SECRET, text, re.IGNORECASE))


@functools.cache
def console() -> Console:
    """Return the console of log and progress, which is standard output."""
    from rich.console import Console  # not for --help

    if is_terminal(sys.stdout):
        return Console()
    # FORCE_COLOR would draw bars into files.
    return Console(force_terminal=False if sys.stdout.isatty() else None, force_interactive=False)


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with a reader. Open MPI gives ranks one that may end in a file."""
    return stream.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ


def log_to_terminal(
    options: argparse.Namespace, level: int = logging.WARNING, *, rank: int = 0, ranks: int = 1
) -> None:
    """Write the log of this process, one of `ranks`, for its user; ranks other than 0 only warn unless verbose. `level`
    counts without the `options` of `VERBOSITY`."""
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
    # Every rank reads the same configuration.
    logging.getLogger("ds_encdec.config").setLevel(logging.ERROR if rank and not verbose else logging.NOTSET)


def _handler() -> TerminalHandler | None:
    return next((one for one in logging.getLogger().handlers if isinstance(one, TerminalHandler)), None)


class TerminalHandler(logging.Handler):
    """Writes log records for people, and for files; the module says how."""

    def __init__(self, rank: int, ranks: int, options: Sequence[str]) -> None:
        super().__init__()
        self.rank, self.ranks, self.options = rank, ranks, options

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            text = printable(self.format(record))
            label = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            if not _is_watched():
                print(self.stamped(text, record.levelname), file=sys.stderr, flush=True)
            elif self.rank:  # another process draws the bar, again on the next line
                print(f"{_ERASED_LINE}rank {self.rank}: {label}{text}", file=sys.stderr, flush=True)
            else:
                from rich.text import Text

                console().print(Text.assemble((label, _STYLES.get(record.levelno, "")), text))
        except Exception:
            self.handleError(record)

    def stamped(self, text: str, level: str) -> str:
        """Return a line of a file, with its time and, among several ranks, its rank."""
        who = f" rank {self.rank}" if self.ranks > 1 else ""
        return f"{datetime.now():%Y-%m-%d %H:%M:%S} {level}{who}: {text}"


def verbosity() -> Sequence[str]:
    """Return this program's options of `VERBOSITY`, for a program that it starts."""
    return () if (handler := _handler()) is None else handler.options


def is_quiet() -> bool:
    """Return whether progress is left out."""
    return "--quiet" in verbosity()


def _is_watched() -> bool:
    return is_terminal(sys.stdout) and is_terminal(sys.stderr)


def stamped(line: str) -> str:
    """Return a line of progress as the log writes it: unchanged on a terminal, and if no program has set up the log."""
    return line if (handler := _handler()) is None or _is_watched() else handler.stamped(line, "INFO")


def take_over(name: str, harmless: Collection[str] = ()) -> None:
    """Route the logger of a library that prints by itself into this program's log, without the `harmless` messages. If
    no program has set up the log, only these messages are left out."""
    library = logging.getLogger(name)
    library.addFilter(lambda record: record.getMessage() not in harmless)
    if _handler() is not None:
        library.handlers.clear()
        library.propagate = True


def print_marked(text: str, styles: Mapping[str, str], *, is_error: bool = False) -> None:
    """Print `text`, on standard error if it `is_error`. On a terminal, what the regular expressions in `styles` match
    has that style."""
    text, stream = printable(text), sys.stderr if is_error else sys.stdout
    if not is_terminal(stream):
        print(text, file=stream, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    marked = Text(text)
    for pattern, style in styles.items():
        marked.highlight_regex(pattern, style)
    (Console(stderr=True) if is_error else console()).print(marked, soft_wrap=True)


def print_error(error: Exception) -> None:
    """Print why the program ends, on standard error."""
    print_marked(f"error: {error}", _STYLES_OF_ERRORS, is_error=True)


@contextmanager
def libraries_print_to_stderr() -> Iterator[TextIO]:
    """Send whatever libraries print inside to standard error; yield standard output, for the answer."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield stdout


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process with exit code 0 once its output has no reader: `| head` has all it needs."""
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


@contextmanager
def interrupts_in_a_line(kept: str = "") -> Iterator[None]:
    """Raise Interrupted at Ctrl-C and SIGTERM, whatever libraries make of the exception that the signal raises, so that
    what writes a file removes it, as after an error; Preempted if what is `kept` is where the next start goes on. The
    second signal has its default effect."""
    came: list[int] = []
    before: dict[int, Any] = {}

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, before[number])
        raise KeyboardInterrupt

    with suppress(ValueError):  # not in the main thread, where no signal arrives
        for number in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = handler
                signal.signal(number, interrupt)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Preempted) or not (came or isinstance(error, KeyboardInterrupt)):
            raise
        first = signal.Signals((*came, signal.SIGINT)[0])
        if kept:
            raise Preempted(f"stopped by {first.name}: any {kept} are kept, and the same command continues") from None
        ended = Interrupted(f"stopped by {first.name} before it was done; no file is left half-written")
        ended.exit_code = 128 + int(first)
        raise ended from None
    finally:
        for caught, handler in before.items():
            if signal.getsignal(caught) is interrupt:  # a training that is over ignores what comes later
                signal.signal(caught, handler)


def outlive_readers() -> None:
    """Drop, from now on, output without a reader (`| head`, a killed `tee`, a closed terminal). This works at the
    process's file descriptors, because libraries also print, log, and flush once more at the exit. Streams that are not
    the process's own (a test's, a notebook's) are left alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError):
                stream.flush()
            file = _Output(stream.fileno(), "w", closefd=False)
            buffered = file if stream.write_through else io.BufferedWriter(file)  # Python's own has none with -u
            options = {
                option: getattr(stream, option) for option in ("encoding", "errors", "line_buffering", "write_through")
            }
            setattr(sys, name, io.TextIOWrapper(buffered, **options))


class _Output(io.FileIO):
    """Takes whatever is written, even if the file does not."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # the reader is gone, the terminal, the disk is full
            return len(data)
