"""The ranges of pyproject.toml, and what is outside of them: in `doctor`, in a model card."""

import re
from importlib.metadata import version

import lock
import pytest
import transformers

from ds_encdec.base import foreign_places
from ds_encdec.base.foreign_places import known_ranges, outside_tested_ranges, range_of
from ds_encdec.commands.doctor import CHECKS, Host
from ds_encdec.config.schema import read_config
from ds_encdec.exports.model_card import untrained_model_card
from ds_encdec.launch.world import World
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig


def test_what_decides_results_has_an_upper_bound() -> None:
    bounded = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "peft", "pydantic")
    assert [package for package in bounded if "<" not in range_of(package)] == []


def test_builds_are_their_version_and_nightlies_are_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_places, "known_ranges", lambda: {"torch": known_ranges()["torch"]})
    for found in ("2.11.0+cu130", "2.14.1", "2.10.0", "2.15.0", "2.15.0.dev20260101+cu130"):
        monkeypatch.setattr(foreign_places, "version", lambda _, found=found: found)
        is_inside = found[:4] in ("2.11", "2.14")
        assert outside_tested_ranges() == ([] if is_inside else [f"torch {found} (tested: {range_of('torch')})"])


def test_doctor_and_a_card_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(read_config(None, ["infra.distributed_type=fsdp"]), World())
    assert f"torch {version('torch')}" in str(CHECKS["packages"](host))
    outside = ["torch 9.9 (tested: >=1,<2)"]
    monkeypatch.setattr("ds_encdec.commands.doctor.outside_tested_ranges", lambda: outside)
    answer = CHECKS["packages"](host)
    assert isinstance(answer, tuple)
    assert answer[0] == "not tested with torch 9.9 (tested: >=1,<2)"
    card = untrained_model_card("nowhere", Qwen3Seq2SeqConfig(), {})
    assert f"transformers {range_of('transformers')} or 4.57 (written under " in card
    assert f"and {transformers.__version__})" in card


def test_a_lock_with_other_versions_or_without_a_hash_is_named() -> None:
    locked, pins = lock.LOCK.read_text(), lock.CONSTRAINTS.read_text()
    assert lock.problems(locked, pins) == []
    changed = re.sub(r"--hash=sha256:\w+", "", locked.replace("accelerate==", "accelerate==9"), count=1)
    assert lock.problems(changed.replace("\npyyaml==", "\nyaml=="), pins) == [
        "absl-py==2.5.1 has no SHA-256",
        "accelerate==91.15.0, but constraints.txt has ==1.15.0",
        "yaml==6.0.3, but constraints.txt has no such package",
        "pyyaml is required by pyproject.toml and is missing",
    ]
