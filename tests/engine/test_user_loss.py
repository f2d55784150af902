"""Losses of a user's own are tried before a run relies on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import load_config
from ds_encdec.engine.user_loss import load_loss

OWN = """
import torch.nn.functional as F

def good(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none") ** 2

def mean(logits, labels):
    return F.cross_entropy(logits, labels).expand(len(labels))

def balanced(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none") / len(labels)

def scalar(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")

def cut(logits, labels):
    return good(logits.detach(), labels)

def broken(logits, labels):
    raise ValueError("my own bug")
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_one_that_can_be_had_is_returned() -> None:
    logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 4, 2])
    assert load_loss("own_loss:good")(logits, labels).shape == (3,)
    load_config(None, ["training.loss=own_loss:good"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mean", "by the tokens beside it"),
        ("balanced", "by the tokens beside it"),
        ("scalar", r"returns \[\] for 6 tokens"),
        ("cut", r"returns \[6\] for 6 tokens. Return one number for each, \[6\], with its gradient"),
        ("broken", r"fails: ValueError: my own bug \(.*own_loss.py:20\)"),
        ("absent", "cannot be imported"),
    ],
)
def test_what_the_loss_cannot_be_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"training.loss=own_loss:{name} .*{told}"):
        load_loss(f"own_loss:{name}")


@pytest.mark.parametrize("beside", ["label_smoothing=0.1", "z_loss=1e-4", "fp16=true"])
def test_settings_of_the_cross_entropy_beside_it_are_refused(beside: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.loss"):
        load_config(None, ["training.loss=own_loss:good", f"training.{beside}"])
