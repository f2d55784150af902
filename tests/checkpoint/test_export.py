"""Exported folders: loaded in a process that has neither ds_encdec nor deepspeed, and written whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fresh_process import without
from safetensors.torch import load_file
from saved_checkpoints import config, random_state, save_checkpoint, tokenizer

from ds_encdec.checkpoint.export import export_checkpoint, export_hf
from ds_encdec.checkpoint.model_card import RunFacts, model_card, untrained_model_card
from ds_encdec.config.schema import FullConfig
from ds_encdec.generate import fill_sentinels, generate_text
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.weights import random_weights
from ds_encdec.types import CheckpointError, TrainingState


def export(out: Path, model_config: Qwen3Seq2SeqConfig, **options: Any) -> None:
    defaults: dict[str, Any] = {"dtype": torch.float32, "max_shard_bytes": 10**9, "card": "a card"}
    weights = random_weights(model_config, seed=0)
    export_hf(weights, model_config, tokenizer(), out, **{**defaults, **options})


GENERATION = """
import json, torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("hello <extra_id_2> world", return_tensors="pt").input_ids
logits = model(input_ids=ids, decoder_input_ids=ids).logits
generated = model.generate(input_ids=ids, max_new_tokens=6, num_beams=2)
print(json.dumps({
    "ids": ids.tolist(), "logits": logits.double().tolist(), "generated": generated.tolist(), "dtype": str(model.dtype),
    "tied": model.lm_head.weight is model.shared.weight, "eos": model.generation_config.eos_token_id,
    "module": type(model).__module__,
}))
"""


@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(True, 10**9), (False, 20_000)])
def test_loads_and_generates_without_ds_encdec(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    model_config, out = config(tie_word_embeddings=tied), tmp_path / "out"
    export(out, model_config, max_shard_bytes=max_shard_bytes)
    fresh = json.loads(without(["ds_encdec", "deepspeed"], GENERATION, out, cwd=tmp_path))
    assert fresh["ids"] == [[2, 6, 3]]
    assert fresh["tied"] == tied
    assert (fresh["eos"], fresh["dtype"]) == (1, "torch.float32")
    assert fresh["module"].startswith("transformers_modules.")
    ours = Qwen3ForSeq2SeqLM.from_pretrained(out).eval()
    ids = torch.tensor(fresh["ids"])
    torch.testing.assert_close(torch.tensor(fresh["logits"]), ours(input_ids=ids, decoder_input_ids=ids).logits)
    assert fresh["generated"] == ours.generate(ids, max_new_tokens=6, num_beams=2).tolist()


def test_tied_weights_are_written_once_in_the_dtype_asked_for(tmp_path: Path) -> None:
    export(tmp_path / "out", config(), dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert (tmp_path / "out" / "README.md").read_text() == "a card"


EXPORT = """
from pathlib import Path
import torch
from ds_encdec.checkpoint.export import export_checkpoint
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), dtype=torch.float32, max_shard_bytes=10**9)
print("done")
"""


def test_a_checkpoint_is_exported_without_deepspeed(tmp_path: Path) -> None:
    state = random_state(config(), seed=3)
    for engine in ("dcp", "deepspeed"):
        checkpoint, out = (
            save_checkpoint(tmp_path / engine, 7, state, config(), engine=engine),
            tmp_path / f"{engine}-out",
        )
        assert without(["deepspeed"], EXPORT, checkpoint, out, cwd=tmp_path) == "done"
        exported = load_file(out / "model.safetensors")
        assert exported.keys() == state["weight"].keys()
        assert all(torch.equal(exported[name], full) for name, full in state["weight"].items())
        assert "checkpoint `step-00000007`" in (out / "README.md").read_text()
        assert (out / "generation_config.json").exists()


def card_code(folder: Path) -> str:
    """The Python code in a folder's model card."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


REPORT = """
import json
print(json.dumps({
    "model": type(model).__name__, "module": type(model).__module__,
    "parameters": [name for name, _ in model.named_parameters()],
    "ids": inputs["input_ids"].tolist(), "mask": inputs["attention_mask"].tolist(),
    "states": states.double().tolist(), "embeddings": embeddings.double().tolist(),
}))
"""


def test_the_encoder_alone_is_an_embedding_model_that_its_card_shows_how_to_use(tmp_path: Path) -> None:
    """The card's own code, run in the folder by a process without ds_encdec, against the whole model's encoder."""
    checkpoint = save_checkpoint(tmp_path, 7, random_state(config(), seed=3), config())
    whole, out = tmp_path / "whole", tmp_path / "encoder"
    export_checkpoint(checkpoint, whole, dtype=torch.float32, max_shard_bytes=10**9)
    export_checkpoint(checkpoint, out, dtype=torch.float32, max_shard_bytes=10**9, encoder_only=True)
    assert {name.partition(".")[0] for name in load_file(out / "model.safetensors")} == {"shared", "encoder"}
    assert not (out / "generation_config.json").exists()
    code = card_code(out).replace('folder = "."', f"folder = {str(out)!r}")
    texts = ["hello world hello", "world"]
    code = re.sub(r"texts = .*", f"texts = {texts!r}", code)
    fresh = json.loads(without(["ds_encdec", "deepspeed"], code + REPORT, cwd=tmp_path))
    assert fresh["model"] == "Qwen3EncoderModel"
    assert fresh["module"].startswith("transformers_modules.")
    encoder = Qwen3ForSeq2SeqLM.from_pretrained(whole).eval().get_encoder()
    assert fresh["parameters"] == [name for name, _ in encoder.named_parameters()]
    ids, mask = torch.tensor(fresh["ids"]), torch.tensor(fresh["mask"])
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    states = encoder(ids, mask).last_hidden_state
    assert torch.equal(torch.tensor(fresh["states"]), states)
    means = torch.stack([states[0].mean(0), states[1, 0]])
    torch.testing.assert_close(torch.tensor(fresh["embeddings"]), means / means.norm(dim=1, keepdim=True))


def test_the_cards_code_of_the_whole_model_runs(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, 7, random_state(config(), seed=3), config())
    export_checkpoint(checkpoint, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=10**9)
    code = card_code(tmp_path / "out").replace('folder = "."', f"folder = {str(tmp_path / 'out')!r}")
    assert without(["ds_encdec", "deepspeed"], code, cwd=tmp_path)


def test_an_existing_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(tmp_path / "out", config())
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_failure_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    def failing(name: str) -> torch.Tensor:
        if name.startswith("decoder"):
            raise OSError("disk on fire")
        return random_weights(config(), 0)(name)

    with pytest.raises(CheckpointError, match="disk on fire"):
        export_hf(failing, config(), None, tmp_path / "out", dtype=torch.float32, max_shard_bytes=10**9, card="")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.tmp").mkdir()  # as a kill leaves it
    export(tmp_path / "out", config())
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_the_card_tells_the_runs_facts() -> None:
    state = TrainingState(global_step=1200, encoder_tokens_seen=5_000_000, target_tokens_seen=6_000_000)
    card = model_card(RunFacts(FullConfig(), state, "checkpoint `step-00001200`"))
    header, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(header) == {
        "library_name": "transformers",  # and no pipeline, for none could load it
        "base_model": "Qwen/Qwen3-0.6B",
        "license": "apache-2.0",
        "datasets": ["HuggingFaceFW/fineweb-edu"],
        "tags": ["encoder-decoder", "ul2", "qwen3"],
    }
    for fact in (
        "`step-00001200`",
        "1,200 of 100,000",
        "5,000,000",
        "6,000,000",
        "HuggingFaceFW/fineweb-edu",
        "0.0002",
    ):
        assert fact in body
    assert "not evaluated" in body
    assert "{" not in body.split("```")[0]


def test_a_cards_header_takes_any_name_and_names_only_what_is_on_the_hub() -> None:
    state = TrainingState(global_step=1)
    sources = [
        {"dataset_name": "someone/it's: #1", "weight": 2},
        {"dataset_name": "text", "data_files": "a", "weight": 1},
    ]
    config = FullConfig.model_validate({"model": {"model_name_or_path": "./a/b"}, "data": {"mixture": sources}})
    card = model_card(RunFacts(config, state, "x"), encoder_only=True)
    header = yaml.safe_load(card.split("---\n")[1])
    assert (header["datasets"], header["pipeline_tag"]) == (["someone/it's: #1"], "feature-extraction")
    assert header.keys().isdisjoint({"base_model", "license"})
    assert "| Data | `someone/it's: #1` × 2, `text` × 1 |" in card


def test_the_untrained_card_says_so() -> None:
    card = untrained_model_card("both sides from a source", config())
    assert "none yet" in card
    assert "both sides from a source" in card


def test_generate_text_answers_every_sentinel_in_place(tmp_path: Path) -> None:
    export(tmp_path / "out", config())
    text = "hello <extra_id_0> world"
    filled = generate_text(tmp_path / "out", text, max_new_tokens=4)
    assert filled.startswith("hello ")
    assert generate_text(tmp_path / "out", text, max_new_tokens=4) == filled
    sampled = {generate_text(tmp_path / "out", "hello", max_new_tokens=8, temperature=2.0, seed=s) for s in range(3)}
    assert len(sampled) > 1
    assert all(text.startswith("hello") for text in sampled)


def test_sentinels_are_replaced_by_their_spans() -> None:
    target = "<extra_id_0> quick brown<extra_id_1> lazy "
    assert fill_sentinels("The<extra_id_0> fox, the<extra_id_1> dog", target) == "The quick brown fox, the lazy  dog"
    assert fill_sentinels("a <extra_id_0> b <extra_id_1>", "<extra_id_0>X") == "a X b <extra_id_1>"
    assert fill_sentinels("a <extra_id_0>", "nonsense") == "a <extra_id_0>"


def test_generate_refuses_what_is_no_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match="ds-encdec init-model"):
        generate_text(tmp_path, "hello")
