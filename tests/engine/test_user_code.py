"""Losses and optimizers of a user's own are tried before a run relies on them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import TrainingConfig, load_config
from ds_encdec.engine import user_code
from ds_encdec.engine.user_code import kept_state, load_loss, try_optimizer
from ds_encdec.memory.estimate import engine_memory
from ds_encdec.memory.job import checkpoint_bytes, make_job, run_sizes

OWN_LOSS = """
import torch.nn.functional as F

def good(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none") ** 2

def mean(logits, labels):
    return F.cross_entropy(logits, labels).expand(len(labels))

def scalar(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")

def cut(logits, labels):
    return good(logits.detach(), labels)

def broken(logits, labels):
    raise ValueError("my own bug")
"""
OWN_OPTIMIZER = """
import torch

class Own(torch.optim.Optimizer):
    def __init__(self, groups, lr, kind="", keeps=(), count=None):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.taken, self.first = 0, [list(group["params"]) for group in self.param_groups]
        self.kind, self.keeps, self.count = kind, keeps.split() if keeps else [], count

    @torch.no_grad()
    def step(self, closure=None):
        for group, first in zip(self.param_groups, self.first):
            for parameter in first if self.kind == "keeps parameters" else group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in self.keeps:
                    state.setdefault(name, torch.zeros_like(parameter))
                if self.count is not None:
                    state["step"] = state.get("step", type(self.count)(0)) + 1
                if self.kind == "begins with gradients":
                    parameter.grad.add_(state.setdefault("exp_avg", parameter.grad.clone()))
                scale = parameter.grad.norm() if self.kind == "by norm" else 1.0
                scale = scale + self.taken if self.kind == "counts in itself" else scale
                scale = 2.0 if self.kind == "by shape" and parameter.ndim > 1 else scale
                parameter.sub_(parameter.grad / scale, alpha=group["lr"])
        self.taken += 1
        if self.kind == "raises":
            raise ValueError("my own bug")

def function(groups, lr):
    return torch.optim.SGD(groups, lr)

def nothing(groups, lr):
    return "no optimizer"
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    (tmp_path / "own_optimizer.py").write_text(OWN_OPTIMIZER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_code, "_tried", {})


@pytest.mark.parametrize(
    ("name", "arguments", "kept"),
    [
        ("own_optimizer:function", {}, ((), None)),
        ("own_optimizer:Own", {"keeps": "exp_avg_sq exp_avg", "count": 5}, (("exp_avg", "exp_avg_sq"), 0)),
        ("torch.optim:AdamW", {"fused": True}, (("exp_avg", "exp_avg_sq"), 0)),
    ],
)
def test_what_is_kept_is_found_by_trying(name: str, arguments: dict[str, Any], kept: tuple[Any, Any]) -> None:
    found = try_optimizer(name, arguments)
    assert (found.moments, found.counter) == kept
    state = found.zero(torch.ones(2, 3))
    assert list(state) == [*(["step"] if kept[1] is not None else []), *kept[0]]
    assert all(state[kind].shape == (2, 3) and not state[kind].any() for kind in kept[0])
    training = TrainingConfig(optimizer=name, optimizer_args=arguments)
    assert kept_state(training, torch.device("cpu")) == found


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("own_optimizer:Own", {"kind": "by norm"}, "updates a number from other numbers of its parameter"),
        ("torch.optim:Adafactor", {}, "keeps "),
        ("own_optimizer:Own", {"keeps": "momentum_buffer"}, "keeps momentum_buffer, but checkpoints hold exp_avg"),
        ("own_optimizer:Own", {"kind": "by shape"}, "or treats matrices differently. Engines split"),
        ("own_optimizer:Own", {"kind": "begins with gradients"}, "gives other results if its states start at zero"),
        ("own_optimizer:Own", {"kind": "counts in itself"}, "keep nothing outside the states"),
        ("own_optimizer:Own", {"kind": "keeps parameters"}, "and step the parameters in param_groups"),
        ("own_optimizer:Own", {"kind": "raises"}, r"does not step: ValueError: my own bug \(.*own_optimizer.py:29\)"),
        ("own_optimizer:Own", {"speed": 1}, r"cannot be made from \(groups, lr, speed\): TypeError"),
        ("own_optimizer:nothing", {}, "returns a str, not a torch.optim.Optimizer"),
    ],
)
def test_what_engines_cannot_have_is_refused(name: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        try_optimizer(name, arguments)
    assert re.match(f"training.optimizer={name} ", str(raised.value))


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_the_estimate_counts_the_moments_it_keeps(engine: str) -> None:
    own = ["training.optimizer=own_optimizer:Own", "training.optimizer_args={keeps: exp_avg}"]
    given = ["infra.sharding_stage=zero2", "infra.offload_optimizer=none", f"infra.distributed_type={engine}"]
    configs = [load_config(None, given), load_config(None, given + own)]
    jobs = [make_job(one, run_sizes(one), engine, world_size=1, ranks_per_node=1) for one in configs]  # type: ignore[arg-type]
    numbers = jobs[0].trainable_parameters
    assert checkpoint_bytes(jobs[0]) - checkpoint_bytes(jobs[1]) == 4 * numbers
    adamw, one_moment = (engine_memory(one).resting.optimizer for one in jobs)
    assert adamw - one_moment == adamw / 2 == pytest.approx(4 * numbers, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mean", "depends on the tokens beside it"),
        ("scalar", r"returns \[\] for 6 tokens"),
        ("cut", r"returns \[6\] for 6 tokens. Return one number for each, \[6\], with its gradient"),
        ("broken", r"fails: ValueError: my own bug \(.*own_loss.py:17\)"),
    ],
)
def test_what_the_loss_cannot_be_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"training.loss=own_loss:{name}:? .*{told}"):
        load_loss(f"own_loss:{name}")


def test_settings_of_the_cross_entropy_beside_it_are_refused() -> None:
    load_config(None, ["training.loss=own_loss:good"])
    with pytest.raises(ConfigError, match=r"training\.loss"):
        load_config(None, ["training.loss=own_loss:good", "training.z_loss=1e-4"])
