"""The files of an exported folder that other libraries read: the tokenizer, and the modules of sentence-transformers.

They are written as transformers 4.57 and all of 5 understand them, whichever version writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_CONFIG = "tokenizer_config.json"


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save `tokenizer` for transformers 4.57 and 5.

    5 names a class that 4.57 does not have, and lists the special tokens under a name by which 4.57 expects a mapping.
    """
    tokenizer.save_pretrained(folder)
    path = folder / _TOKENIZER_CONFIG
    fields: dict[str, Any] = json.loads(path.read_text())
    for of_this_machine in ("backend", "is_local", "local_files_only"):
        fields.pop(of_this_machine, None)
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    fields["model_input_names"] = ["input_ids", "attention_mask"]  # 4.57 would add token types, which no model here has
    _write_json(path, fields)


def write_sentence_transformers(folder: Path, hidden_size: int, longest_text: int) -> None:
    """Make the folder of an encoder one for `SentenceTransformer(folder, trust_remote_code=True)` as well.

    Its embedding of a text is the mean of the states of its tokens, of length 1. Texts are cut to `longest_text`
    tokens. The names of classes and fields are those of version 3, which all later ones read.
    """
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(modules.items())
    ]
    _write_json(folder / "modules.json", listed)
    _write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest_text, "do_lower_case": False})
    (folder / modules["Pooling"]).mkdir()
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    _write_json(folder / modules["Pooling"] / "config.json", pooling)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
