"""The study of quality in small: the conversion keeps what its source has learned, and the study's runs go on."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    import quality

    yield quality
    torch.set_num_threads(threads)
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def study(quality: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return quality.make_study(tmp_path_factory.mktemp("quality"), quality.SIZES["ci"], 0)[0]


def test_the_conversion_keeps_what_a_trained_source_knows(quality: Any, study: Any) -> None:
    assert quality.problems(quality.losses_of_conversion(study)) == []


def layers_in_another_order(model: Any) -> None:
    layers = model.encoder.layers
    layers[1], layers[2] = layers[2], layers[1]


def a_lost_norm(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.norms_encoder = False


@pytest.mark.parametrize("change", [layers_in_another_order, a_lost_norm])
def test_a_conversion_that_is_wrong_is_seen(quality: Any, study: Any, change: Callable[[Any], None]) -> None:
    found = quality.losses_of_conversion(study, change)
    assert any(problem.startswith(quality.CAUSAL) for problem in quality.problems(found))


def test_all_runs_are_done_once_and_a_long_one_goes_on(
    quality: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quality_runs import TOTAL_ARMS, Runs
    from quality_source import Phase

    size = replace(quality.SIZES["ci"], phases=(Phase(20_000, 64, 0.3, 0.2, 12),), eval_examples=20)
    runs = Runs(tmp_path, quality.make_study(tmp_path, size, 0)[0])
    monkeypatch.setattr("quality_tables.RESAMPLES", 10)
    names = list(runs.all())
    assert names[0] == "step0"
    total = f"total {TOTAL_ARMS[-1]}"
    assert names[-1] == total
    assert "| lookup, seeds: 1 |" in "\n".join(quality.tables(runs))
    quality.draw(runs, tmp_path / "curves.svg")
    whole = runs.result(total)
    assert whole is not None

    (tmp_path / "runs" / f"{total}.json").unlink()
    monkeypatch.setattr("quality_source.SAVED_EVERY", 3)
    kept, marks = Runs._kept, []

    def ends(self: Any, name: str, mark: int, losses: Any) -> dict[str, float]:
        marks.append(mark)
        if len(marks) == 5:
            raise KeyboardInterrupt
        return kept(self, name, mark, losses)

    monkeypatch.setattr(Runs, "_kept", ends)
    with pytest.raises(KeyboardInterrupt):
        runs.total(TOTAL_ARMS[-1])
    assert list(runs.all()) == names
    assert marks.count(marks[0]) == 1  # it has not begun again
    again = runs.result(total)
    assert again is not None
    for mark, losses in whole["marks"].items():
        assert again["marks"][mark] == pytest.approx(losses, rel=1e-4)
