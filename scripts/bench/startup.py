"""CPU seconds until commands that need no torch answer: python scripts/bench/startup.py [COMMIT]

Each command is started many times, in turns with the others, so that a busy machine slows them alike. Printed are the
median and the least of user and system time of the process, beside those of an interpreter that does nothing and, where
a COMMIT is given, those of its code. The first start of each writes its bytecode and does not count.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

from turns import ROOT, in_turns, median, report

PROGRAM = "import sys; from ds_encdec.cli import main; sys.exit(main())"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import pydantic": ["-c", "import pydantic; pydantic.BaseModel"],
    "ds-encdec --help": ["-c", PROGRAM, "--help"],
    "ds-encdec validate": ["-c", PROGRAM, "validate", "ds_configs/quickstart.yaml"],
    "ds-encdec train, misspelt": ["-c", PROGRAM, "train", "trainning.max_steps=1"],
    "ds-encdec plan": ["-c", PROGRAM, "plan"],
}


def cpu_seconds(arguments: list[str], root: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *arguments], cwd=root, env=environment, stdout=quiet, stderr=quiet)
    used = os.wait4(process.pid, 0)[2]
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what to compare with, e.g. main")
    parser.add_argument("--starts", type=int, default=21, help="of each command (default 21)")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        roots = {"this": ROOT}
        if options.commit:
            archive = subprocess.run(["git", "archive", options.commit], cwd=ROOT, check=True, capture_output=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(folder, filter="data")
            roots[options.commit] = Path(folder)
        starts = {
            (name, side): partial(cpu_seconds, arguments, root)
            for name, arguments in COMMANDS.items()
            for side, root in roots.items()
        }
        found = in_turns(starts, options.starts + 1)
    rows = [
        {"command": name}
        | {
            f"{side}, {of}": of_starts(found[name, side][1:])
            for side in roots
            for of, of_starts in (("median", median), ("least", min))
        }
        for name in COMMANDS
    ]
    report("CPU seconds until a command has ended", rows, options.json)


if __name__ == "__main__":
    main()
