"""The matrix of faults and its page have the same rows, and what rows name exists."""

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
# In a process of its own: the matrix decides about threads and devices of the process that imports it.
NAMED = """
import matrix, bench
print(matrix.page({}), end="")
for row in matrix.ROWS.values():
    if isinstance(row.run, bench.Program):
        for word in row.run.words:
            if ".py" in word:
                print("exists", word, "(test_|main)", sep="\\t", file=matrix.sys.stderr)
    elif isinstance(row.run, bench.Disturbed):
        for fault in (*row.run.faults, *row.run.before):
            print("exists", "tests/faults/sabotage.py", fault["kind"], sep="\\t", file=matrix.sys.stderr)
"""

# Three rows of the matrix are others here, and so is the page.
DISTURBED = """
import os, subprocess, sys, time
from pathlib import Path
import matrix
from bench import Result, Row

def hang(bench):
    start("hung", start_new_session=True)
    time.sleep(1000)

def die(bench):
    start("orphan")
    os._exit(3)

def start(name, **options):
    started = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    Path(sys.argv[1], name).write_text(str(started.pid))

matrix.PAGE = Path(sys.argv[1], "faults.md")
rows = {"killed-rank": Row("", hang, minutes=0.02), "signals": Row("", die)}
matrix.ROWS.update(rows, hub=Row("", lambda bench: Result(7)))
sys.exit(matrix.main(["--write", "--row", "killed-rank", "signals", "hub"]))
"""


def test_the_page_is_what_the_rows_make_of_it_and_rows_name_what_exists() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", NAMED], cwd=ROOT / "scripts" / "faults", capture_output=True, text=True, check=True
    )
    named = [line.split("\t")[1:] for line in ran.stderr.splitlines() if line.startswith("exists\t")]
    assert named
    for path, name in named:
        assert re.search(rf"^def {name}", (ROOT / path).read_text(), re.MULTILINE), (path, name)
    assert (ROOT / "docs" / "faults.md").read_text() == ran.stdout, "run ./scripts/faults.sh --write --row …"


def test_a_row_that_hangs_or_dies_stops_no_other_and_all_are_written(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "faults.md", tmp_path)
    command = [sys.executable, "-c", DISTURBED, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT / "scripts" / "faults", capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    text = (tmp_path / "faults.md").read_text()
    for row, verdict in {
        "killed-rank": r"0 \| \| \*\*failed\*\*: it took longer than 0.02 minutes",
        "signals": r"0 \| \| \*\*failed\*\*: the process that ran it has died",
        "hub": r"7 \| \| held",
    }.items():
        assert re.search(rf"^\| {row} \| [^|]+ \| {verdict} \|", text, re.MULTILINE), text
    for name in ("hung", "orphan"):
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(int((tmp_path / name).read_text())).status() == psutil.STATUS_ZOMBIE
