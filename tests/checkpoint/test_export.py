"""Exported folders: loaded in a process that has neither ds_encdec nor deepspeed, and written whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_encdec.checkpoint.export import export_hf, model_card, untrained_model_card
from ds_encdec.config.schema import FullConfig
from ds_encdec.generate import fill_sentinels, generate_text
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.initialization import random_weights
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.sentinels import add_sentinels
from ds_encdec.types import CheckpointError, TrainingState

WORDS = {"<pad>": 0, "<eos>": 1, "hello": 2, "world": 3}


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    add_sentinels(made, 4, mode_tokens=False)
    return made


def config(**changes: Any) -> Qwen3Seq2SeqConfig:
    sizes = {
        "vocab_size": 24,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "sentinel_token_ids": [4, 5, 6, 7],
    }
    return Qwen3Seq2SeqConfig(**{**sizes, **changes})


def export(out: Path, model_config: Qwen3Seq2SeqConfig, **options: Any) -> None:
    defaults: dict[str, Any] = {"dtype": torch.float32, "max_shard_bytes": 10**9, "card": "a card"}
    weights = random_weights(model_config, seed=0)
    export_hf(weights, model_config, tokenizer(), out, **{**defaults, **options})


FRESH_PROCESS = """
import json, sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("ds_encdec", "deepspeed"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import torch
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
    "blocked": [m for m in sys.modules if m.partition(".")[0] in ("ds_encdec", "deepspeed")],
}))
"""


@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(True, 10**9), (False, 20_000)])
def test_loads_and_generates_without_ds_encdec(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    model_config, out = config(tie_word_embeddings=tied), tmp_path / "out"
    export(out, model_config, max_shard_bytes=max_shard_bytes)
    command = [sys.executable, "-I", "-c", FRESH_PROCESS, str(out)]
    environment = {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    fresh = json.loads(run.stdout.splitlines()[-1])
    assert fresh["ids"] == [[2, 6, 3]]
    assert fresh["tied"] == tied
    assert (fresh["eos"], fresh["blocked"], fresh["dtype"]) == (1, [], "torch.float32")
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

    with pytest.raises(OSError, match="disk on fire"):
        export_hf(failing, config(), None, tmp_path / "out", dtype=torch.float32, max_shard_bytes=10**9, card="")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "out", config())  # the half-written folder is in nobody's way
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_the_card_tells_the_runs_facts() -> None:
    run = FullConfig().model_dump(mode="json")
    state = TrainingState(global_step=1200, encoder_tokens_seen=5_000_000, target_tokens_seen=6_000_000)
    card = model_card({"config": run, "state": state.to_dict(), "checkpoint": "step-00001200"})
    header, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model: Qwen/Qwen3-0.6B" in header.splitlines()
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
