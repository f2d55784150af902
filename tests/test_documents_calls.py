"""Calls by the names and forms that users may know from earlier programs of this kind.

`export_checkpoint(checkpoint, out)` is in tests/checkpoint/test_export.py.
"""

import dataclasses

import torch

from ds_encdec.base.types import TrainingState
from ds_encdec.commands.phases.plan import PhaseConfig, TrainingPhase
from ds_encdec.memory.library import auto_find_batch_size
from ds_encdec.monitor.monitor import TrainingMonitor


def test_training_state_counts_tokens_in_one_number_and_keeps_it() -> None:
    state = TrainingState(global_step=1000, epoch=1, best_eval_loss=2.5, total_tokens_seen=1_000_000)
    assert TrainingState.from_dict(state.to_dict()) == state
    assert (state.total_tokens_seen, state.encoder_tokens_seen) == (1_000_000, 1_000_000)
    assert (state.best_value, state.to_dict()["best_value"], "best_eval_loss" in state.to_dict()) == (2.5, 2.5, False)
    assert dataclasses.replace(state, best_value=None).best_value is None


def test_a_phase_is_validated_by_what_was_set_on_the_monitor() -> None:
    limits = {"max_loss_after_warmup": 10.0, "min_loss_decrease": 0.5}
    phase = PhaseConfig(phase=TrainingPhase.VALIDATION, num_tokens=1_000_000, description="Test", **limits)
    monitor = TrainingMonitor()
    monitor.initial_loss, monitor.warmup_complete_loss = 10.0, 8.0
    for _ in range(50):
        monitor.loss_window.add(7.0)
    assert monitor.validate_phase(phase)["passed"]
    assert monitor.get_summary()["loss"]["current"] == 7.0


def test_a_batch_size_is_looked_for_from_32_down() -> None:
    model, tried = torch.nn.Linear(4, 1), []

    def sample_batch(size: int) -> torch.Tensor:
        tried.append(size)
        return torch.ones(size, 4)

    assert auto_find_batch_size(model, sample_batch) == 32
    assert auto_find_batch_size(model, sample_batch, start_batch_size=8, min_batch_size=2) == 8
    assert tried == [32, 8]
