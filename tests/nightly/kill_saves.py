"""Ends training at random moments in every ordinary way, resumes it, and checks what is left each time.

    python tests/nightly/kill_saves.py    100 kills in the middle of saves
    python tests/nightly/kill_saves.py --kills 10 --engine fsdp --async
    python tests/nightly/kill_saves.py --stops --large    100 signals that ask for a stop, to every process
    python tests/nightly/kill_saves.py --stops --kills 10 --launcher torchrun

Two gloo ranks run the real program on a tiny model, with data workers, and save every few steps.

Kills: both are killed (SIGKILL, one shortly after the other) at a random time after a save has begun. Then every
visible checkpoint must verify, the steps trained since the newest one (metrics.jsonl has a line for every step) must be
no more than an interval, or two where saves are written in the background, and the next start must go on from it: with
the other way of saving, in turn.

Stops: SIGTERM, SIGINT, SIGHUP and SIGUSR1 in turn go to the whole process group, 0 to 3 s after the first data worker
has started or the first step was made. Every rank must end with 75, the last step trained must be in a checkpoint that
verifies, and nothing may be left running. With `--launcher` it is the launcher's group that gets them (and SIGKILL the
launcher alone), now and then while its ranks are still starting; what counts is then run.json, for launchers have exit
codes of their own.

At the end each run's losses, norms and rates must equal those of one that was never interrupted, to the last digit; and
each goes on with the other engine.

A start takes one to three seconds instead of ten because ranks are forked from this process, which has imported
everything (not under a launcher). Needs the `dev` extra: the run is the tests' own (tests/launch/tiny_run.py). Exit
code 1 where a check failed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from killed_run import ENGINES, SAVE_STEPS, WORLD_SIZE, Tally, Victim, Way

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are killed on the way out
    if options.launcher:  # torchrun's ranks take a share of the cores each: one, as the forked ones do
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORLD_SIZE])
    engines = (options.engine,) if options.engine else ENGINES
    modes = (True, False) if options.async_save is None else (options.async_save,)
    stops: list[signal.Signals | None] = [None]
    if options.stops:
        modes, stops = modes[:1], [*STOPS, *[signal.SIGKILL] * bool(options.launcher)]
    ways = [Way(engine, mode, stop) for stop in stops for mode in modes for engine in engines]
    began = time.monotonic()
    tallies = {way: Tally() for way in ways}
    rng = random.Random(options.seed)
    with TemporaryDirectory(prefix="kill-saves-") as scratch:
        victims = {engine: Victim(Path(scratch), engine, options, rng) for engine in engines}
        turns = islice(cycle(ways), options.kills)
        failed = not all(_passes(victims[way.engine], Victim.end_once, way, tallies[way]) for way in turns)
        for victim in victims.values():
            failed |= not _passes(victim, Victim.compare)
    print("| engine, saves or signal | ends | before the commit | checkpoints verified | steps lost: mean | at most |")
    print("|---|---|---|---|---|---|")
    for way, tally in tallies.items():
        mean, most = (f"{fmean(tally.lost):.1f}", max(tally.lost)) if tally.lost else ("", "")
        print(f"| {way} | {tally.ends} | {tally.unfinished} | {tally.verified} | {mean} | {most} |")
    compared = ", ".join(f"{victim.compared} of {engine}" for engine, victim in victims.items())
    print(f"steps whose losses equal those of a run that was never interrupted: {compared}")
    ends = sum(tally.ends for tally in tallies.values())
    print(f"{ends} ends in {time.monotonic() - began:.0f} s, seed {options.seed}, a save every {SAVE_STEPS} steps")
    return int(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="ends in all (default 100)")
    parser.add_argument("--engine", choices=ENGINES, help="(default both)")
    parser.add_argument("--async", dest="async_save", action="store_const", const=True, help="in the background only")
    parser.add_argument("--sync", dest="async_save", action="store_const", const=False, help="at once only")
    parser.add_argument("--stops", action="store_true", help="signals that ask for a stop, instead of kills")
    parser.add_argument("--workers", type=int, default=1, choices=(0, 1, 4), help="data workers a rank (default 1)")
    parser.add_argument("--large", action="store_true", help="micro-batches above 64 KB")
    parser.add_argument("--launcher", choices=("torchrun", "deepspeed"), help="a real one (with --stops)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    options = parser.parse_args()
    if options.launcher and not options.stops:
        parser.error("--launcher goes with --stops")
    return options


def _passes(victim: Victim, action: Callable[..., None], *arguments: Any) -> bool:
    """Return whether everything was as it must be; anything that was not is printed."""
    try:
        action(victim, *arguments)
    except Exception:
        print(f"{arguments[0] if arguments else victim.engine}:\n{traceback.format_exc()}", file=sys.stderr)
        print(victim.log_tail(), file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
