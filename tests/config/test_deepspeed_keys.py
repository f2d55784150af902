"""The list of DeepSpeed's keys against the DeepSpeed that is installed."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ds_encdec.config.yaml.deepspeed_keys import KEYS

# Sections that DeepSpeed reads key by key, without a schema of its own that one could ask.
READ_BY_HAND = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")


class Recorder(dict[str, Any]):
    """A configuration that notes every key DeepSpeed asks it for."""

    def __init__(self, asked: set[str], path: str = "", **values: Any) -> None:
        super().__init__(**values)
        self.asked, self.path = asked, path

    def _note(self, key: str) -> None:
        self.asked.add(self.path + key)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Recorder":
        return self


@pytest.fixture(scope="module")
def asked() -> set[str]:
    """Every key that DeepSpeed's parser looks up outside its pydantic models."""
    from deepspeed.runtime.config import DeepSpeedConfig

    names: set[str] = set()
    blocks = {block: Recorder(names, f"{block}.") for block in READ_BY_HAND}
    optimizer = Recorder(names, "optimizer.", type="AdamW", params={})
    timers = Recorder(names, "timers.")
    DeepSpeedConfig(
        Recorder(names, train_micro_batch_size_per_gpu=1, optimizer=optimizer, timers=timers, scheduler={}, **blocks)
    )
    return names


def test_every_key_that_deepspeed_reads_is_listed(asked: set[str]) -> None:
    known = KEYS | {key[:end] for key in KEYS for end in range(len(key)) if key[end] == "."}
    assert {key for key in asked if key not in known} == set()
    assert len(asked) > 60, "the recorder missed most of them"


def test_the_snapshot_is_of_the_installed_deepspeed() -> None:
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "dev" / "deepspeed_keys.py"))
    assert json.loads(script["SNAPSHOT"].read_text()) == script["snapshot"]()
    assert len(script["snapshot"]()["blocks"]) == 13
