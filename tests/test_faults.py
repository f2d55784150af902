"""The matrix of faults and its page have the same rows, and what rows name exists."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In a process of its own: the matrix decides about threads and devices of the process that imports it.
NAMED = """
import matrix, bench
print(matrix.page({}), end="")
for row in matrix.ROWS.values():
    if isinstance(row.run, bench.Tests):
        for word in row.run.words:
            if ".py" in word:
                print("exists", word, "test_", sep="\\t", file=matrix.sys.stderr)
    elif isinstance(row.run, bench.Function):
        module, _, name = row.run.name.partition(":")
        print("exists", f"scripts/faults/{module}.py", name, sep="\\t", file=matrix.sys.stderr)
    elif isinstance(row.run, bench.Disturbed):
        for fault in (*row.run.faults, *row.run.before):
            print("exists", "tests/faults/sabotage.py", fault["kind"], sep="\\t", file=matrix.sys.stderr)
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
