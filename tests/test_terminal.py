"""The log of a program of ours where no terminal shows it; on one, see tests/monitor/test_sinks.py."""

import argparse
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_encdec.base.terminal import (
    TerminalHandler,
    has_url_secret,
    is_quiet,
    log_to_terminal,
    print_error,
    print_marked,
    stamped,
    take_over,
)
from ds_encdec.base.types import ConfigError

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    loggers = root, logging.getLogger("ds_encdec"), logging.getLogger("ds_encdec.config")
    levels = [logger.level for logger in loggers]
    yield
    root.handlers[:] = [one for one in root.handlers if not isinstance(one, TerminalHandler)]
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("address", "holds"),
    [
        ("https://host/x.parquet?download=true", False),
        ("s3://bucket/x?versionId=1", False),
        ("zip://*.json::hf://datasets/x@rev/f.zip", False),
        ("http://host:8080/a@b", False),
        ("ftp://user:pass@host/x", True),
        ("https://token@host/x", True),
        ("https://host/x?X-Amz-Signature=ab", True),
        ("https://host/x#sig=ab", True),
    ],
)
def test_an_address_is_refused_for_its_secrets_alone(address: str, holds: bool) -> None:
    assert has_url_secret(address) == holds


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What of four lines of all levels comes out, without their times."""
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("ds_encdec.training.trainer").log(level, "%s", "it")
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(STAMP, line) for line in lines)
    return [re.sub(STAMP, "", line) for line in lines]


@pytest.mark.parametrize(
    ("options", "rank", "ranks", "lines"),
    [
        ({}, 0, 1, ["INFO: it", "WARNING: it", "ERROR: it"]),
        ({}, 0, 2, ["INFO rank 0: it", "WARNING rank 0: it", "ERROR rank 0: it"]),
        ({}, 1, 2, ["WARNING rank 1: it", "ERROR rank 1: it"]),
        ({"verbose": True}, 1, 2, ["DEBUG rank 1: it", "INFO rank 1: it", "WARNING rank 1: it", "ERROR rank 1: it"]),
        ({"quiet": True}, 0, 1, ["WARNING: it", "ERROR: it"]),
    ],
)
def test_each_line_has_time_level_and_rank(
    options: dict[str, bool], rank: int, ranks: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_terminal(argparse.Namespace(), logging.INFO)  # which the next call replaces
    log_to_terminal(argparse.Namespace(**options), logging.INFO, rank=rank, ranks=ranks)
    assert told(capsys) == lines
    of_all_ranks = logging.getLogger("ds_encdec.config.yaml.deepspeed_json")
    assert of_all_ranks.isEnabledFor(logging.WARNING) is (rank == 0 or "verbose" in options)
    assert re.fullmatch(STAMP + ("INFO rank 0: step 1" if ranks > 1 else "INFO: step 1"), stamped("step 1")) or rank
    assert is_quiet() is bool(options.get("quiet"))


EVIL = "\x1b[31mred\x07\u202ediorta\udc80\x9b2J https://me:hunter2@host/x?sig=hunter2"
SHOWN = r"\x1b[31mred\x07\u202ediorta\udc80\x9b2J https://***@host/x?***"


def test_text_of_others_controls_no_terminal_and_shows_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_terminal(argparse.Namespace(), logging.INFO)
    logging.getLogger("ds_encdec").warning("%s", EVIL.replace("\udc80", ""))  # pytest keeps it, and sends UTF-8
    print_error(ConfigError(EVIL))
    print_marked(EVIL, {})
    out, err = capsys.readouterr()
    lines = [line.removeprefix("error: ").split("WARNING: ")[-1] for line in (out + err).splitlines()]
    assert sorted(lines) == sorted([SHOWN, SHOWN, SHOWN.replace(r"\udc80", "")])


def test_a_generated_text_is_shown_to_a_terminal_and_kept_for_a_file(tmp_path: Path) -> None:
    program = f"from ds_encdec.base.terminal import print_text; print_text({EVIL.replace(chr(0xDC80), '')!r})"
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-c", program], stdout=theirs, check=True)
    assert os.read(ours, 1000).decode().strip() == SHOWN.replace(r"\udc80", "")
    kept = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout
    assert kept.decode().strip() == EVIL.replace("\udc80", "")


def test_a_librarys_log_loses_only_what_is_known_to_be_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("a library that prints by itself")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    log_to_terminal(argparse.Namespace(), rank=0, ranks=8)
    take_over(library.name, ["all is well"])
    for message in ("all is well", "all is well but this", "all is lost"):
        library.warning(message)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(STAMP, "", line) for line in lines] == [
        "WARNING rank 0: all is well but this",
        "WARNING rank 0: all is lost",
    ]


PRINTS_ON = """
import logging, sys
from rich.console import Console
from ds_encdec.base.terminal import outlive_readers
outlive_readers()
logging.basicConfig(format="%(message)s")
sys.stdin.readline()  # by now the readers are gone
for _ in range(3):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    logging.error("a line of the log")
    Console().print("a line of metrics")
print("unflushed", end="")
sys.exit(75)
"""


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_process_outlives_the_readers_of_its_output(options: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, *options, "-c", PRINTS_ON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    streams = (process.stdout, process.stderr, process.stdin)
    assert process.stdin is not None
    process.stdin.write(b"\n")  # which is only read once it is flushed, below
    for stream in streams:
        assert stream is not None
        stream.close()
    assert process.wait(timeout=300) == 75


def test_what_is_read_is_all_there(tmp_path: Path) -> None:
    with open(tmp_path / "both", "wb") as file:
        subprocess.run([sys.executable, "-c", PRINTS_ON], input=b"\n", stdout=file, stderr=file, timeout=300)
    text = (tmp_path / "both").read_text()
    for line, times in (("to stdout", 3), ("to stderr", 3), ("a line of the log", 3), ("a line of metrics", 3)):
        assert text.count(f"{line}\n") == times
    assert text.endswith("unflushed")
