"""`ds-encdec init-model`: from a Qwen3 folder to one that trains, in little memory."""

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
from ds_encdec.commands.model_folders import init_model
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import parameter_shapes
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
    with_tokenizer(source)
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
