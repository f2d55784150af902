"""Judges a run of ds_configs/quickstart_embeddings.yaml on its test split: functions that it has not seen.

    python scripts/dev/embedding_quickstart.py output/quickstart_embeddings

Writes RUN/retrieval/test.jsonl (a docstring's first paragraph, and its function without it) and the encoder as it was
before its first step, and prints the figures of `ds-encdec evaluate --task retrieval` for both encoders, and those of
BM25 and TF-IDF (stdlib_retrieval.py), which know the words of the same texts alone. A test function's module may have
other functions in the training data.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from stdlib_retrieval import judge as judge_words

from ds_encdec.config.schema import load_saved
from ds_encdec.data.build import Opener, example_maker
from ds_encdec.data.eval_set import split_rows
from ds_encdec.evaluate.embedding_tasks import read_retrieval
from ds_encdec.evaluate.embeddings import judge
from ds_encdec.exports.hugging_face import export_hf
from ds_encdec.model.configuration import Qwen3EncoderConfig
from ds_encdec.training.run_model import new_model

FIGURES = ("mrr@10", "recall@1", "recall@10", "ndcg@10")


def main(run: Path) -> None:
    config, out = load_saved(run / "config.yaml"), run / "retrieval"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    model = new_model(config)
    assert model.weights is not None
    maker = example_maker(config.data, config.training.seed, model.tokenizer, model.vocabulary)
    sources = Opener(config.data, config.training.seed, maker, {}).open_sources(1)
    records = [row.record for row, _ in split_rows(sources, "test", maker)]
    rows = out / "test.jsonl"
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    export_hf(
        model.weights,
        Qwen3EncoderConfig.of(model.config),
        model.tokenizer,
        out / "untrained",
        dtype=torch.float32,
        card="",
        longest_text=config.data.max_encoder_length,
        run=config,
    )
    trained = run / "export" / ("best" if config.training.load_best_model_at_end else "final")
    found = judge_words(rows)
    for name, folder, dims in (("untrained", out / "untrained", ()), ("trained", trained, (64, 32))):
        _, result = judge(
            folder, rows, read_retrieval(rows), out=out / f"{name}-figures", dimensions=dims, device="cpu"
        )
        for dim in ("", *(f"_dim{size}" for size in dims)):
            title = name + dim.replace("_dim", ", first ")
            found[title] = {figure: result["figures"][figure + dim] for figure in FIGURES}
    print(f"{len(records)} descriptions, each to find its own among as many functions")
    print(f"{'':20}" + "".join(f"{figure:>11}" for figure in FIGURES))
    for name, figures in found.items():
        print(f"{name:20}" + "".join(f"{figures[figure]:11.1f}" for figure in FIGURES))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
