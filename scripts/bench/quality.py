"""Does a decoder make a good encoder-decoder? A source decoder, arms made from it, and the tables of docs/quality.md.

    python scripts/bench/quality.py run --folder /tmp/quality            # five hours on one core; goes on if ended
    python scripts/bench/quality.py table --folder /tmp/quality --out quality.svg     # what is done; and a drawing
    python scripts/bench/quality.py step0 --source FOLDER --text FILE --folder /tmp/step0      # of any real decoder
    python scripts/bench/quality.py check --folder /tmp/check       # half a minute: fails where the conversion does

All is decided by seeds. Each run is done once and leaves its file in the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from quality_arms import ARMS, SOURCE, Study, by_denoiser, evaluate, packed_losses
from quality_runs import Results, Runs
from quality_source import SIZES, Size, make_source
from quality_tables import draw, step0, tables
from quality_text import make_texts

from ds_encdec.base.types import CheckpointError, ConfigError

COPIES_FROM = 1.0  # nats that the second reading of a passage is below the first
IDENTITY = 1e-4  # nats: with a causal encoder the aligned form is the source
ALIGNED_LOSES = 0.02  # nats at most at step 0
OTHERS_LOSE = 0.05  # at least
CAUSAL = "aligned, causal encoder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"run": run, "table": table, "step0": measure_step0, "check": check}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="table: the drawing, an SVG")
    parser.add_argument("--source", type=Path, help="step0: a decoder's folder")
    parser.add_argument("--text", type=Path, help="step0: a text, .txt or .jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        commands[options.command](options)
    except (CheckpointError, ConfigError) as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    study, facts = make_study(options.folder, SIZES[options.size], 0, options.device)
    gain = facts["first reading"] - facts["second reading"]
    print(f"the second reading of a passage is {gain:.2f} nats below the first", flush=True)
    if gain < COPIES_FROM and options.size != "ci":
        sys.exit("the source does not copy: no form of an encoder can show its worth on it")
    for _ in Runs(options.folder, study).all():
        pass


def make_study(folder: Path, size: Size, seed: int, device: str = "cpu") -> tuple[Study, dict]:
    """The study of a source that is trained here, and what is known of that."""
    texts = folder / "text"
    make_texts(texts, size.documents)
    facts = make_source(folder / "source", texts, size, seed=seed, device=device)
    return Study(size, folder / "source", texts / "ul2.jsonl", texts / "eval.jsonl", device), facts


def table(options: argparse.Namespace) -> None:
    if not (options.folder / "runs").is_dir():
        sys.exit(f"error: --folder: {options.folder} has no runs")
    results = Results(options.folder, SIZES[options.size])
    print("\n".join(tables(results)))
    if options.out:
        draw(results, options.out)


def measure_step0(options: argparse.Namespace) -> None:
    size = replace(SIZES["cpu"], chunk=512, eval_examples=100)
    study = Study(size, options.source, options.text, options.text, options.device)
    runs = Runs(options.folder, study)
    runs.untrained()
    print("\n".join(step0(runs)))


def check(options: argparse.Namespace) -> None:
    found = losses_of_conversion(make_study(options.folder, SIZES["ci"], 0)[0])
    print(json.dumps(found, indent=1))
    if wrong := problems(found):
        sys.exit("\n".join(wrong))
    print("passed: all are within their bounds")


def losses_of_conversion(study: Study, change: Callable[[torch.nn.Module], None] = lambda model: None) -> dict:
    """The losses of the source and of each form at step 0. `change` is done to each model first."""
    found = {}
    for name in ("final", "renormed", "aligned"):
        model = study.model(ARMS[name], seed=0)
        change(model)
        found[name] = evaluate(model, ARMS[name].view, study.evaluation)
    causal = partial(packed_losses, model, is_causal=True)
    found[CAUSAL] = evaluate(model, ARMS[name].view, study.evaluation, lambda batch: causal(batch).token_losses)
    found[SOURCE] = study.source_losses(model)
    return {name: by_denoiser(losses)["all"] for name, losses in found.items()}


def problems(found: dict[str, float]) -> list[str]:
    """Return what is wrong with a conversion of which `losses_of_conversion` found this."""
    lost = {name: loss - found[SOURCE] for name, loss in found.items()}
    bounds = {CAUSAL: (-IDENTITY, IDENTITY), "aligned": (-ALIGNED_LOSES, ALIGNED_LOSES)}
    bounds |= dict.fromkeys(("renormed", "final"), (OTHERS_LOSE, 10.0))
    return [
        f"{name} is {lost[name]:+.4f} nats from the source: it must be within {least:+g} and {most:+g}"
        for name, (least, most) in bounds.items()
        if not least <= lost[name] <= most
    ]


if __name__ == "__main__":
    main()
