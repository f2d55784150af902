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


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
