"""Several sets to evaluate on: each has the figures that it has alone, on any number of ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_run import QUICKSTART, launcher, overrides, run

from ds_encdec.base.types import ConfigError
from ds_encdec.config.schema import DataConfig, TrainingConfig, load_config
from ds_encdec.data.sources.sources import named_sources
from ds_encdec.monitor.sinks import shown


def evaluations(folder: Path, name: str, how: str, *settings: str) -> list[dict[str, float]]:
    words = overrides(
        folder / name,
        training__num_train_steps=2,
        training__warmup_steps=1,
        training__eval_steps=1,
        training__export_at_end="false",
        training__report_to="none",
        data__dataset_name="json",
        data__data_files=folder / "train.jsonl",
        infra__distributed_type="fsdp",
    )
    done = run([*launcher(how), "--config", QUICKSTART, *words, *settings], folder)
    assert done.returncode == 0, done.stdout
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval/loss" in line]


@pytest.mark.launch
def test_two_sets_on_two_ranks_have_the_figures_of_each_alone(tmp_path: Path) -> None:
    for name, count in (("train", 200), ("easy", 3), ("hard", 9)):
        rows = [{"text": f"{name} {i}: " + "one river runs to the sea " * (1 + i % 5)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard")}
    sets = "{" + ", ".join(f"{name}: {{eval_files: {path}}}" for name, path in files.items()) + "}"
    best_by = "training.metric_for_best_model=hard/loss"
    both = evaluations(
        tmp_path, "both", "torchrun", f"data.eval_files={files['easy']}", f"data.eval_sets={sets}", best_by
    )
    assert len(both) == 2
    for name, path in files.items():
        alone = evaluations(tmp_path, name, "python", f"data.eval_files={path}", "infra.num_gpus=1")
        for here, there in zip(both, alone, strict=True):
            for figure in ("loss", "perplexity"):
                assert here[f"eval/{name}/{figure}"] == pytest.approx(there[f"eval/{figure}"], rel=1e-4)
    assert both[0]["eval/easy/loss"] == both[0]["eval/loss"] != both[0]["eval/hard/loss"]
    saved = max((tmp_path / "both" / "checkpoints").rglob("trainer.json")).read_text()
    best = min(line["eval/hard/loss"] for line in both)
    assert [float(value) for value in re.findall(r'"best_value": ([\d.]+)', saved)] == [pytest.approx(best)]


def test_each_set_is_what_its_fields_say() -> None:
    data = DataConfig(
        dataset_name="someone/texts",
        dataset_revision="v1",
        eval_split="validation",
        eval_sets={"old": {"eval_split": "test"}, "new": {"eval_dataset_name": "json", "eval_files": "a.jsonl"}},  # type: ignore[dict-item]
    )
    sources = named_sources(data)
    assert [*sources] == ["source-0", "validation", "eval-old", "eval-new"]
    assert (sources["eval-old"].dataset_split, sources["eval-old"].dataset_revision) == ("test", "v1")
    assert (sources["eval-new"].dataset_name, sources["eval-new"].data_files) == ("json", ("a.jsonl",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data__eval_sets": "{a: {}}"}, "name its texts"),
        ({"data__eval_sets": "{a/b: {eval_split: test}}"}, "names are of letters"),
        ({"data__eval_sets": "{a: {eval_files: x, eval_split: test}}"}, "files have no splits"),
        ({"data__eval_sets": "{a: {eval_split: test}}", "training__eval_samples": 0}, "nothing is evaluated"),
        ({"training__metric_for_best_model": "a/loss"}, "a/loss is no figure of a set"),
    ],
)
def test_sets_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Path(QUICKSTART), [f"{name.replace('__', '.')}={value}" for name, value in fields.items()])


def test_the_best_checkpoint_may_be_by_a_set_and_lines_show_all() -> None:
    assert not TrainingConfig(metric_for_best_model="hard/loss").best_is_greatest
    assert TrainingConfig(metric_for_best_model="eval_hard_loss").metric_for_best_model == "hard/loss"
    metrics = {"eval/loss": 2.0, "eval/easy/loss": 1.0, "eval/hard/loss": 3.0, "eval/hard/loss_S": 3.0}
    assert shown(metrics, "hard/loss") == ["hard loss 3.0000", "eval loss 2.0000", "easy loss 1.0000"]
