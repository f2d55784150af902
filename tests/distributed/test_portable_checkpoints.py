"""What one engine saved on some ranks, another continues on others: same samples, same losses.

Each side saves once and loads once, always from the other kind of engine and another number of ranks;
scripts/dev/checkpoint_matrix.py runs all pairs. States alone: test_engines.py.
"""

import json
from pathlib import Path

import pytest
from portable_runs import (
    ADAPTERS,
    TESTED_SIDES,
    TESTED_STEPS,
    Continued,
    Pair,
    Side,
    continue_all,
    save_all,
    uninterrupted,
)

from ds_encdec.model.parameter_count import is_adapter

pytestmark = pytest.mark.distributed

BOUND = 1e-5  # nats


def pairs() -> list[Pair]:
    return [(side, TESTED_SIDES[(index + 1) % len(TESTED_SIDES)]) for index, side in enumerate(TESTED_SIDES)]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, Continued]:
    folder: Path = tmp_path_factory.mktemp("portable")
    saved = save_all(TESTED_SIDES, folder, TESTED_STEPS)
    return continue_all(pairs(), saved, uninterrupted(folder, TESTED_STEPS), folder, TESTED_STEPS)


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: f"{pair[0]}, {pair[1]}")
def test_goes_on_like_the_uninterrupted_run(continued: dict[Pair, Continued], pair: Pair) -> None:
    assert continued[pair].same_samples
    assert continued[pair].loss_difference < BOUND


def test_adapters_go_on_with_the_same_dropout_and_are_all_that_is_saved(tmp_path: Path) -> None:
    changes = ADAPTERS | {"training.learning_rate": 3e-2, "training.eval_samples": 8, "training.export_at_end": True}
    saver, loader = Side("ZeRO-3 offload", 2), Side("FSDP2", 1)
    saved = save_all([saver], tmp_path, TESTED_STEPS, changes)
    reference = uninterrupted(tmp_path, TESTED_STEPS, changes)
    assert reference["losses"][TESTED_STEPS] != pytest.approx(reference["losses"][1], abs=0.01)
    (found,) = continue_all([(saver, loader)], saved, reference, tmp_path, TESTED_STEPS, changes).values()
    assert found.same_samples
    assert found.loss_difference < BOUND
    run = tmp_path / f"saved by {saver}, continued by {loader}"
    facts = json.loads((run / "run.json").read_text())
    assert 0 < facts["trainable_parameters"] < 0.2 * facts["parameters"]
    groups = json.loads((saved[saver] / "engine.json").read_text())["groups"]
    assert all(is_adapter(name) for group in groups for name in group)
    tensors = sum(file.stat().st_size for file in (saved[saver] / "zero").iterdir())
    assert tensors < 2 * 12 * facts["trainable_parameters"] + 100_000  # pickles
    assert (run / "export" / "final" / "model.safetensors").exists()  # merged
