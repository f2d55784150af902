"""Does a decoder make a good encoder-decoder? A source decoder, the arms made from it, and the tables of docs/quality.md.

    python scripts/bench/quality.py run --size cpu --folder /tmp/quality          two hours on one core; goes on if ended
    python scripts/bench/quality.py run --size gpu --folder /tmp/quality --device cuda                 see scripts/gpu/
    python scripts/bench/quality.py tables --size cpu --folder /tmp/quality --out docs              the tables and drawing
    python scripts/bench/quality.py step0 --source FOLDER --text FILE --folder /tmp/step0     what any decoder loses at once
    python scripts/bench/quality.py check --folder /tmp/check                     two minutes: fails where conversion fails

Everything is deterministic by its seed. Each run is done once and leaves its file in the folder.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from quality_arms import Study
from quality_runs import Runs
from quality_sizes import SIZES, Size
from quality_source import COPIES_FROM, make_source
from quality_tasks import Tasks
from quality_text import make_texts

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"run": run}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only-source", action="store_true", help="end when the source is trained")
    options = parser.parse_args()
    torch.set_num_threads(1)
    commands[options.command](options)


def run(options: argparse.Namespace) -> None:
    size, folder, texts = SIZES[options.size], options.folder, options.folder / "text"
    make_texts(texts, size.documents)
    facts = make_source(folder / "source", texts, size, seed=SEED, device=options.device, compiled=True)
    gain = facts["first reading"] - facts["second reading"]
    print(f"the second reading of a passage is {gain:.2f} nats below the first", flush=True)
    if gain < COPIES_FROM:
        sys.exit("the source does not copy: no form of an encoder can show its worth on it")
    if options.only_source:
        return
    study = Study(
        size, folder / "source", {name: texts / f"{name}.jsonl" for name in ("ul2", "eval")}, "json", options.device
    )
    runs = Runs(folder, study)
    for name in runs.all(Tasks(texts, study.tokenizer, study.vocabulary, size.task_examples)):
        print(name, runs.result(name), flush=True)
    if size.task_marks:
        runs.total()


if __name__ == "__main__":
    main()
