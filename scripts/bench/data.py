"""Tokens a second on one core, from text in parquet to micro-batches: our loader beside a collator of single examples.

    python scripts/bench/data.py [--tokenizer FOLDER] [--micro-batches 40] [--rounds 7] [--json rows.json] [FILE ...]

FILEs are parquet with a column `text`; without any, the built-in corpus is written into one. Both read the same rows,
tokenize, denoise and make tensors in one process, in turns. The collator is what training scripts bring along: a row
at a time through Hugging Face's tokenizer, cut into examples, spans drawn for each, a batch padded to its longest.
Other turns are our loader on random ids, which need no tokenizing, and our tokenizing alone. Tokens are those of both
sides, without padding, a second of CPU; `fill` is their share of the tensors.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from turns import ROOT, in_turns, median, report

from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.data.build import build_data
from ds_encdec.data.sources.builtin_corpus import builtin_documents
from ds_encdec.data.text_tokenizer import TextTokenizer
from ds_encdec.training.run_model import run_tokenizer

MEAN_SPAN, NOISE = 3.0, 0.15
Taken = tuple[int, int]  # tokens, and the places for them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokenizer", default="builtin", help="folder with a tokenizer.json")
    parser.add_argument("--micro-batches", type=int, default=40, help="of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-length", type=int, default=1024, help="of the encoder's side; the decoder's: half")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = options.files or [Path(folder) / "text.parquet"]
        if not options.files:
            pq.write_table(pa.table({"text": [document.text for document in builtin_documents()]}), files[0])
        config = partial(configuration, files, options.tokenizer, options.max_length)
        streams = {
            "ours": ours(config("parquet")),
            "a collator of single examples": per_example(config("parquet"), files),
            "ours, on random ids": ours(config("random")),
            "our tokenizing alone": tokenized(config("parquet"), files),
        }
        takes = {name: partial(measure, stream, options.micro_batches) for name, stream in streams.items()}
        for take in takes.values():
            take()  # opens files and builds tables
        turns = in_turns(takes, options.rounds)
    speeds = {name: [tokens / seconds for tokens, _, seconds in found] for name, found in turns.items()}
    rows = [
        {
            "pipeline": name,
            "M tokens / CPU s": median(speeds[name]) / 1e6,
            "fill": median(tokens / places for tokens, places, _ in turns[name]),
            "over ours": median(mine / base for mine, base in zip(speeds[name], speeds["ours"], strict=True)),
        }
        for name in turns
    ]
    report(f"from parquet to micro-batches, {options.tokenizer} tokenizer", rows, options.json)


def measure(stream: Iterator[Taken], count: int) -> tuple[int, int, float]:
    """Take `count` micro-batches; returns tokens, places and seconds of CPU."""
    began = time.process_time()
    tokens, places = map(sum, zip(*islice(stream, count), strict=True))
    return tokens, places, time.process_time() - began


def configuration(files: Sequence[Path], tokenizer: str, max_length: int, source: str) -> FullConfig:
    listed = ", ".join(str(path.absolute()) for path in files)
    settings = f"""model.tokenizer_name_or_path={tokenizer} model.architecture.vocab_size=16000
        data.dataset_name={source} data.max_seq_length={max_length} data.max_encoder_length={max_length}
        data.max_decoder_length={max_length // 2} data.num_lanes=1 data.preprocessing_num_workers=0 data.eval_fraction=0
        training.per_device_train_batch_size=4 training.eval_samples=0""".split()
    named = [f"data.data_files=[{listed}]"] if source == "parquet" else []
    return load_config(ROOT / "ds_configs" / "quickstart.yaml", [*settings, *named])


def ours(config: FullConfig) -> Iterator[Taken]:
    """Our loader, without worker processes."""
    tokenizer, vocabulary = run_tokenizer(config)
    data = build_data(config, tokenizer, vocabulary, rank=0, world_size=1, num_lanes=1)
    while True:
        for batch in next(data.loader):
            yield batch.encoder_tokens + batch.target_tokens, batch.encoder_ids.numel() + batch.labels.numel()


def tokenized(config: FullConfig, files: Sequence[Path]) -> Iterator[Taken]:
    """The text of about a micro-batch at a time."""
    encode, count = TextTokenizer(run_tokenizer(config)[0].backend_tokenizer).encode, 0
    for text in texts(files):
        count += len(encode(text))
        if count > 4 * config.data.max_encoder_length:
            yield count, count
            count = 0


def texts(files: Sequence[Path]) -> Iterator[str]:
    while True:
        for path in files:
            for part in pq.ParquetFile(path).iter_batches(columns=["text"]):
                yield from part.column("text").to_pylist()


def per_example(config: FullConfig, files: Sequence[Path]) -> Iterator[Taken]:
    """T5's objective as a collator draws it, and padding."""
    tokenizer, vocabulary = run_tokenizer(config)
    corrupt = partial(corrupted, vocabulary.sentinel_ids, vocabulary.eos_id, np.random.default_rng(0))
    pad: Callable[[list[Tensor]], Tensor] = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_value=-1)
    longest = int(config.data.max_encoder_length / (1 - NOISE))
    size, waiting = config.training.micro_batch_size, list[np.ndarray]()
    for text in texts(files):
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
        waiting += [ids[start : start + longest] for start in range(0, len(ids) - 1, longest)]
        while len(waiting) >= size:
            pairs = [corrupt(waiting.pop(0)) for _ in range(size)]
            sides = [pad([torch.tensor(side) for side in one]) for one in zip(*pairs, strict=True)]
            yield sum(int((side >= 0).sum()) for side in sides), sum(side.numel() for side in sides)


def corrupted(
    sentinels: Sequence[int], eos_id: int, draw: np.random.Generator, ids: np.ndarray
) -> tuple[list[int], list[int]]:
    """Input and target of one example: random spans replaced by sentinels, token by token."""
    noise = max(1, min(round(len(ids) * NOISE), len(ids) - 1))
    spans = max(1, min(round(noise / MEAN_SPAN), len(ids) - noise, len(sentinels)))
    lengths = [np.diff([0, *np.sort(draw.permutation(n - 1)[: spans - 1]) + 1, n]) for n in (len(ids) - noise, noise)]
    encoder: list[Any] = []
    decoder: list[Any] = []
    place = 0
    for sentinel, kept, hidden in zip(sentinels, *lengths, strict=False):
        encoder += [*ids[place : place + kept], sentinel]
        decoder += [sentinel, *ids[place + kept : place + kept + hidden]]
        place += kept + hidden
    return encoder, [*decoder, eos_id]


if __name__ == "__main__":
    main()
