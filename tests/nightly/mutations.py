"""Plants mistakes in the code, one at a time, and runs the tests that must notice each.

mutations.toml has a row for each: the file, the text there, the text in its place, and the tests of which at least one
must fail. With --faults, rows of the matrix of faults (scripts/faults) run in place of tests. All is done in a copy of
the repository. First the tests run on the code as it is, where they must pass. Exit code 1: a mistake was not noticed,
or a row does not fit the code.

    python tests/nightly/mutations.py [--only NAME]... [--area AREA]... [--sample N --seed S] [--before "nice -n 19"]
    python tests/nightly/mutations.py --faults
"""

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROWS = Path(__file__).with_name("mutations.toml")
NOTICED = ("noticed", "hung", "died")
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
MATRIX = ("scripts/faults/matrix.py", "--minutes", "30", "--row")


@dataclass(frozen=True)
class Mutation:
    """A row. `area`: the name of its table in mutations.toml. `tests`: nodes as pytest takes them. `row`: of the matrix
    of faults."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: list[str] = field(default_factory=list)
    row: str = ""

    def problems(self, repository: Path) -> Iterator[str]:
        """Yield why the row does not fit the code, if it does not."""
        path = repository / self.file
        found = path.read_text().count(self.old) if path.exists() else 0
        if found != 1 or self.old == self.new:
            yield f"{self.name}: its text is {found} times in {self.file}, not once, or is not changed"
        for test in self.tests:
            module, function = test.partition("::")[0], test.rpartition("::")[2]
            text = (repository / module).read_text() if (repository / module).is_file() else ""
            if not re.search(rf"^ *def {function.partition('[')[0]}\(", text, re.MULTILINE):
                yield f"{self.name}: there is no test {test}"
        if not self.tests and not self.row:
            yield f"{self.name}: no test is named"
        if self.row and f'"{self.row}": ' not in (repository / "scripts/faults/rows.py").read_text():
            yield f"{self.name}: there is no row {self.row} in scripts/faults/rows.py"


def read_rows(path: Path = ROWS) -> list[Mutation]:
    tables = tomllib.loads(path.read_text())
    return [Mutation(area, **row) for area, rows in tables.items() for row in rows]


@contextmanager
def planted(mutation: Mutation, copy: Path) -> Iterator[None]:
    path = copy / mutation.file
    original = path.read_text()
    byte_code = Path(cache_from_source(str(path)))  # it would count for a text of the same second and size
    path.write_text(original.replace(mutation.old, mutation.new))
    byte_code.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.write_text(original)
        byte_code.unlink(missing_ok=True)


class Tests:
    """Runs tests in `copy`, each run with `before` in front of its command and `seconds` at most."""

    def __init__(self, copy: Path, before: Sequence[str], seconds: int) -> None:
        self._copy, self._before, self._seconds = copy, before, seconds

    def run(self, tests: Sequence[str], program: Sequence[str] = PYTEST) -> tuple[str, str]:
        """Return `passed`, `noticed`, `hung`, `died` (by a signal) or `error`, and the end of the output."""
        command = [*self._before, sys.executable, *program, *tests]
        variables = {**os.environ, "PYTHONPATH": str(self._copy)}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # or each run compiles all
        process = subprocess.Popen(
            command,
            cwd=self._copy,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # all that the tests start ends with them
        )
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "hung", process.communicate()[0]
        if process.returncode < 0 or process.returncode > 128:  # of pytest, or of a command before it
            return "died", output
        return {0: "passed", 1: "noticed"}.get(process.returncode, "error"), output


def copy_repository(into: Path) -> Path:
    """Copy the files of the working tree that git tracks, or would track."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0"):
        source = REPOSITORY / name
        if name and (source.is_file() or source.is_symlink()):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into / name, follow_symlinks=False)
    return into


def chosen(rows: Sequence[Mutation], arguments: argparse.Namespace) -> list[Mutation]:
    found = [
        row
        for row in rows
        if (not arguments.only or row.name in arguments.only) and (not arguments.area or row.area in arguments.area)
        if (row.row if arguments.faults else row.tests)
    ]
    if arguments.sample and arguments.sample < len(found):
        found = sorted(random.Random(arguments.seed).sample(found, arguments.sample), key=rows.index)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--area", action="append", default=[])
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N rows, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", default="", metavar="COMMAND", help="words in front of each command of pytest")
    parser.add_argument("--seconds", type=int, default=900, help="most that the tests of a row may take")
    parser.add_argument("--faults", action="store_true", help="run rows of the matrix of faults in place of tests")
    parser.add_argument("--no-intact", action="store_true", help="leave out the tests on the code as it is")
    arguments = parser.parse_args()
    rows = chosen(read_rows(), arguments)
    if not rows:
        parser.error("no row has such a name or area")
    program = MATRIX if arguments.faults else PYTEST
    failed = []

    def named(row: Mutation) -> list[str]:
        return [row.row] if arguments.faults else row.tests

    with tempfile.TemporaryDirectory() as folder:
        tests = Tests(copy := copy_repository(Path(folder)), shlex.split(arguments.before), arguments.seconds)
        if not arguments.no_intact:
            intact, output = tests.run(sorted({one for row in rows for one in named(row)}), program)
            if intact != "passed":
                print(output, "The tests do not pass on the code as it is.", sep="\n")
                return 1
        for row in rows:
            began, verdict, output = time.monotonic(), "error", "\n".join(row.problems(copy))
            if not output:
                with planted(row, copy):
                    verdict, output = tests.run(named(row), program)
            if verdict not in NOTICED:
                failed.append(row.name)
            found = re.search(r"^FAILED \S+::(\S+)|^\| (\S+) \|.*\*\*failed\*\*(:.*) \|.*\|$", output, re.MULTILINE)
            by = f" by {found[1] or found[2] + found[3]}" if verdict == "noticed" and found else ""
            print(f"{row.area:12} {row.name:60} {verdict}{by}, {time.monotonic() - began:.0f} s", flush=True)
            if verdict == "error":
                print(output[-2000:])
    print(f"{len(rows) - len(failed)} of {len(rows)} mistakes were noticed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
