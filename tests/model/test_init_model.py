"""`ds-encdec init-model`: from a Qwen3 folder to one that trains, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import qwen3_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ds_encdec.base.types import CheckpointError
from ds_encdec.commands.model_folders import default_vocabulary, init_model
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.model.weights import write_safetensors_folder
from ds_encdec.tokenizer.load import pretrained_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    qwen3_folder(tmp_path / "source", vocab_size=50, eos_token_id=1, bos_token_id=0)
    return tmp_path / "source"


def test_a_source_with_a_tokenizer_gives_a_folder_with_sentinels(source: Path, tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(source)
    made = init_model(str(source), tmp_path / "out", 6)
    assert "no tokenizer" not in made
    model = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.config.sentinel_token_ids == list(range(3, 9))
    number = sum(parameter.numel() for parameter in model.parameters())
    assert made.endswith(f", {number:,} parameters, 6 sentinels (ids 3 to 8)")
    tokenizer = pretrained_tokenizer(str(tmp_path / "out"), field="test")
    assert tokenizer.encode("word <extra_id_5>") == [2, 8]


def test_a_source_without_a_tokenizer_gives_the_weights_and_says_so(source: Path, tmp_path: Path) -> None:
    made = init_model(str(source), tmp_path / "out", 6)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        init_model(str(source), tmp_path / "out", 6)
    assert made.splitlines()[0].endswith(" parameters, 6 sentinels (ids 50 to 55)")
    assert "no tokenizer" in made.splitlines()[1]
    original = Qwen3ForCausalLM.from_pretrained(source)
    model = Qwen3ForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.shared.weight.shape == (128, 32)
    assert torch.equal(model.shared.weight[:50], original.model.embed_tokens.weight)
    theirs = original.model.layers[1].state_dict()
    for ours in (model.encoder.layers[1].state_dict(), model.decoder.layers[1].state_dict()):
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_default_ids_of_a_qwen3_are_its_spare_rows() -> None:
    stored = {"vocab_size": 151936, "eos_token_id": 151645, "bos_token_id": 151643}
    vocabulary = default_vocabulary(stored, 100)
    assert vocabulary.sentinel_ids == tuple(range(151669, 151769))
    assert (vocabulary.eos_id, vocabulary.pad_id) == (151645, 151643)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        default_vocabulary({"vocab_size": 151936, "eos_token_id": [1, 2]}, 100)


MEASURE = """
import re, sys
from pathlib import Path
from ds_encdec.commands.model_folders import init_model
def resident(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew, imports are behind us
before = resident("VmRSS")
init_model(sys.argv[1], Path(sys.argv[2]))
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux' own account of memory")
def test_peak_memory_is_that_of_the_embedding_not_of_the_model(tmp_path: Path) -> None:
    """A source of 252 MB whose embedding has 16.8 MB: four embeddings (stored, extended, two while drawing) or so.

    A process's resident memory also grows by pages of libraries that it first touches meanwhile.
    """
    sizes = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 25}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True}
    config = Qwen3Config(**sizes, **heads, eos_token_id=1, bos_token_id=0, num_encoder_layers=0)
    source = tmp_path / "source"
    config.save_pretrained(source)
    shapes = {
        name.replace("decoder.", "model.").replace("shared", "model.embed_tokens"): shape
        for name, shape in parameter_shapes(config).items()
        if not name.startswith("encoder.")
    }
    write_safetensors_folder(
        source, shapes, lambda name: torch.zeros(shapes[name]), dtype=torch.bfloat16, max_shard_bytes=60_000_000
    )
    source_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    embedding_bytes = 2 * 16384 * 512
    assert source_bytes > 200e6
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    peak_bytes = int(run.stdout.splitlines()[-1])
    print(json.dumps({"source_bytes": source_bytes, "embedding_bytes": embedding_bytes, "peak_bytes": peak_bytes}))
    assert embedding_bytes < peak_bytes < source_bytes / 2
