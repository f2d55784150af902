"""The end of a process whose output nobody reads any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_encdec.base.terminal import outlive_readers

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
    """`| head`, a killed `tee`, ssh: with its own exit code, also after Python's last flush."""
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


def test_other_streams_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    outlive_readers()
    print("seen by the test")
    assert capsys.readouterr().out == "seen by the test\n"
