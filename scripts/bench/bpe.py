"""Tokens a second by tiktoken's BPE and by Hugging Face's tokenizers, side by side on one core.

    python scripts/bench/bpe.py [--tokenizer FOLDER] [--pairs 9] [FILE ...]

Without files it reads the built-in corpus, without a folder the built-in tokenizer. Medians of pairs: each measures
both on the same documents, one behind the other, in seconds of CPU, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

from ds_encdec.data.builtin_corpus import builtin_documents
from ds_encdec.data.text_tokenizer import TextTokenizer, slow_ids
from ds_encdec.tokenizer.load import builtin_tokenizer, pretrained_tokenizer


def seconds(function: Callable[[str], object], documents: list[str]) -> float:
    start = time.process_time()
    for text in documents:
        function(text)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json")
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    corpus = [document.text for document in builtin_documents()]
    documents = [path.read_text() for path in options.files] or corpus
    named = options.tokenizer
    loaded = pretrained_tokenizer(named, field="--tokenizer") if named else builtin_tokenizer(corpus, 16000)
    start = time.perf_counter()
    tokenizer = TextTokenizer(loaded.backend_tokenizer)
    print(f"opened in {time.perf_counter() - start:.2f} s")
    if tokenizer.faster is None:
        parser.error("tiktoken's ids are not known to be this tokenizer's")
    tokens = sum(len(tokenizer.encode(text)) for text in documents)
    pairs = [
        (seconds(tokenizer.encode, documents), seconds(lambda text: slow_ids(tokenizer.backend, text), documents))
        for _ in range(options.pairs)
    ]
    fast, slow = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    print(f"{len(documents)} documents, {tokens:,} tokens; medians of {options.pairs} pairs")
    print(
        f"tiktoken {tokens / fast / 1e6:.2f} Mtokens/s, tokenizers {tokens / slow / 1e6:.2f} Mtokens/s: {ratio:.1f} x"
    )


if __name__ == "__main__":
    main()
