"""Rows about what happens at one moment, and about changes at random."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import ENGINES, ROOT, SETTINGS, Bench, ForkedRuns, Result, arguments, assert_equal


def two_starts(bench: Bench) -> Result:
    """Start one command twice, for a new run and for a resume, and hold what is left against an undisturbed run."""
    problems = []
    with ForkedRuns() as other, ThreadPoolExecutor(2) as both:
        for engine in ENGINES:
            folder = bench.new_folder()
            for last, options in ((8, ()), (12, ("--resume", "auto"))):
                changes: dict[str, Any] = SETTINGS | {"training__lr_scheduler_type": "constant"}
                command = arguments(folder, engine, *options, **changes | {"training__num_train_steps": last})
                ends = [*both.map(lambda runs, words=command: runs.run(words, ranks=2), (bench.runs, other))]
                if sorted(end.codes for end in ends) != [[0, 0], [3, 3]]:
                    problems.append(f"{engine}: {[end.codes for end in ends]}\n{ends[0].output}\n{ends[1].output}")
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            trained = [line["step"] for line in lines if "train/loss" in line]
            if trained != sorted(set(trained)):
                problems.append(f"{engine}: steps {trained}")
            try:
                assert_equal(folder, bench.undisturbed(engine, training__lr_scheduler_type="constant"))
            except AssertionError as error:
                problems.append(f"{engine}: {error}")
    return Result(2 * len(ENGINES), problems=tuple(problems))


def changed_configurations(bench: Bench, count: int) -> Result:
    """Validate so many configurations that were changed at random."""
    command = [sys.executable, "tests/nightly/mutate_configs.py", "--count", str(count)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Result(count, problems=(ran.stdout + ran.stderr,) if ran.returncode else ())
