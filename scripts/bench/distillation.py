"""Does a teacher help? The same students with one and without, on the same tokens, and their losses on held-out text.

    python scripts/bench/distillation.py decoder --folder output/decoder     # a decoder and text, in minutes, once
    python scripts/bench/distillation.py run --folder output/decoder         # 3 seeds under either engine, 2 ranks
    python scripts/bench/distillation.py table --folder output/decoder       # of what is done

Students are runs of ds_configs/quickstart_distillation.yaml. Each is done once and leaves its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from quality_source import Phase, Size, make_source
from quality_text import make_texts

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "ds_configs" / "quickstart_distillation.yaml"
# Four layers, 0.5 M parameters, on 60 % of the text that every Python has.
DECODER = Size(
    documents=0,
    hidden=96,
    layers=4,
    phases=(Phase(200_000, 64, 0.3, 0.2, 12), Phase(800_000, 256, 0.05, 0.1, 32)),
    source_rate=0.01,
    copied_tokens=64,
)
ENGINES = {
    "DeepSpeed ZeRO-2": {},
    "FSDP2": {"infra.distributed_type": "fsdp", "infra.sharding_stage": "zero3"},
}
ARMS = {"without": {"training.teacher": "null"}, "with": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("decoder", "run", "table"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="of the students, such as training.teacher_weight=0.9")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command != "table":
        make_texts(options.folder / "text", DECODER.documents)
        make_source(options.folder / "source", options.folder / "text", DECODER, seed=0, device="cpu")
    if options.command == "run":
        for engine, arm, seed in runs(options.seeds):
            train(options.folder.resolve(), engine, arm, seed, options.settings)
    if options.command != "decoder":
        table(options.folder, options.seeds)


def runs(seeds: int) -> Iterator[tuple[str, str, int]]:
    """Engine, arm and seed of each run."""
    yield from ((engine, arm, seed) for seed in range(1, seeds + 1) for engine in ENGINES for arm in ARMS)


def place(folder: Path, engine: str, arm: str, seed: int) -> Path:
    return folder / "students" / f"{engine.split()[0]}-{arm}-{seed}"


def train(folder: Path, engine: str, arm: str, seed: int, settings: list[str]) -> None:
    """Train a student on two ranks, unless it is there."""
    out = place(folder, engine, arm, seed)
    if (out / "export").is_dir():
        return
    given = {
        "model.model_name_or_path": folder / "source",
        "data.data_files": folder / "text" / "ul2.jsonl",
        "data.eval_files": folder / "text" / "eval.jsonl",
        "infra.output_dir": out,
        "training.seed": seed,
        "training.report_to": "none",
        **ENGINES[engine],
        **ARMS[arm],
    }
    words = [f"{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(REPOSITORY / "ds_encdec" / "train.py"), "--config", str(CONFIG), *words, *settings]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    print(f"{out.name}: {losses(out)[-1]:.4f}", flush=True)


def losses(out: Path) -> list[float]:
    """The held-out losses of a run, in nats a token."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["eval/loss"] for line in lines if "eval/loss" in line]


def table(folder: Path, seeds: int) -> None:
    print("| engine | without a teacher | with | gain by seed |\n|---|---|---|---|")
    for engine in ENGINES:
        found = {
            arm: [losses(out)[-1] for seed in range(1, seeds + 1) if (out := place(folder, engine, arm, seed)).is_dir()]
            for arm in ARMS
        }
        pairs = [*zip(found["without"], found["with"], strict=False)]
        if not pairs:
            continue
        means = [f"{statistics.mean(side):.4f} ± {spread(side):.4f}" for side in found.values()]
        gains = ", ".join(f"{plain - taught:+.4f}" for plain, taught in pairs)
        print(f"| {engine} | {' | '.join(means)} | {gains} |")
        if len(pairs) == seeds and min(plain - taught for plain, taught in pairs) <= 0:
            sys.exit(f"{engine}: a student without a teacher is not worse")


def spread(values: list[float]) -> float:
    """The standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
