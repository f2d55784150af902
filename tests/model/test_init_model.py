"""`ds-encdec init-model`: from a Qwen3 folder to one that trains, in little memory."""

import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import qwen3_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ds_encdec.base.types import CheckpointError
from ds_encdec.commands.model_folders import init_model
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.weights import write_safetensors_folder
from ds_encdec.tokenizer.load import pretrained_tokenizer


def with_tokenizer(folder: Path) -> Path:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def test_a_source_gives_a_folder_with_its_weights_twice_and_sentinels(tmp_path: Path) -> None:
    qwen3_folder(source := tmp_path / "source", vocab_size=50, eos_token_id=1, bos_token_id=0)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        init_model(str(source), tmp_path / "out", 6)
    made = init_model(str(with_tokenizer(source)), tmp_path / "out", 6)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        init_model(str(source), tmp_path / "out", 6)
    original, model = Qwen3ForCausalLM.from_pretrained(source), Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.config.sentinel_token_ids == list(range(3, 9))
    number = sum(parameter.numel() for parameter in model.parameters())
    assert made.endswith(f", {number:,} parameters, 6 sentinels (ids 3 to 8)")
    assert pretrained_tokenizer(str(tmp_path / "out"), field="test").encode("word <extra_id_5>") == [2, 8]
    assert torch.equal(model.shared.weight[:3].float(), original.model.embed_tokens.weight[:3].bfloat16().float())
    theirs = original.model.layers[1].state_dict()
    for ours in (model.encoder.layers[1].state_dict(), model.decoder.layers[1].state_dict()):
        assert all(torch.equal(ours[name].float(), tensor.bfloat16().float()) for name, tensor in theirs.items())


def test_tensors_are_written_in_turn(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def weights(_: str, rows: slice = slice(None), /) -> torch.Tensor:
        assert sum(one() is not None for one in made) <= 1  # the one before
        tensor = torch.zeros(8, 4)
        made.append(weakref.ref(tensor))
        return tensor

    shapes = dict.fromkeys("abcdef", (8, 4))
    write_safetensors_folder(tmp_path, shapes, weights, dtype=torch.float32, max_shard_bytes=256)
    assert (len(made), len(list(tmp_path.glob("*.safetensors")))) == (6, 3)
