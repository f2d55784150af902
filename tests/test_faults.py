"""The matrix of faults and its page name the same rows, and what rows name exists."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In a process of its own: the matrix decides about threads and devices of the process that imports it.
NAMED = """
import rows, bench
for group, named in rows.GROUPS.items():
    for name, row in named.items():
        print("row", group, name, sep="\\t")
        for run in filter(None, (row.run, row.quick)):
            if isinstance(run, bench.Tests):
                for node in run.nodes:
                    print("exists", *node.partition("::")[::2], sep="\\t")
            elif isinstance(run, bench.Function):
                print("exists", f"scripts/faults/{run.module}.py", run.name, sep="\\t")
            else:
                for fault in run.faults:
                    print("exists", "tests/faults/sabotage.py", fault["kind"], sep="\\t")
"""


def test_rows_name_what_exists_and_the_page_has_each_in_its_group() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", NAMED], cwd=ROOT / "scripts" / "faults", capture_output=True, text=True, check=True
    )
    lines = [line.split("\t") for line in ran.stdout.splitlines()]
    for kind, path, name in lines:
        if kind == "exists":
            assert re.search(rf"^def {name or 'test_'}", (ROOT / path).read_text(), re.MULTILINE), (path, name)
    page = (ROOT / "docs" / "faults.md").read_text()
    listed = [
        (section.partition("\n")[0], name)
        for section in page.split("\n## ")[1:]
        for name in re.findall(r"^\| ([a-z][a-z-]+) \| .+ \| .+ \|$", section, re.MULTILINE)
        if name != "row"
    ]
    assert listed == [(group, name) for kind, group, name in lines if kind == "row"]
