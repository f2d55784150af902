"""Fine-tuning on two real ranks: epochs in steps, rows that are passed over, a kill, and the same steps on one rank."""

import json
from pathlib import Path

import pytest
from forked_runs import ENGINES, QUIET, ForkedRuns
from tiny_run import REPOSITORY, metrics, overrides

from ds_encdec.config.schema import load_saved

pytestmark = [pytest.mark.distributed]


CONFIG = str(REPOSITORY / "ds_configs" / "quickstart_sft.yaml")
SETTINGS = QUIET | {
    "data__dataset_name": "json",
    "data__max_decoder_length": 32,
    "data__on_bad_row": "skip",
    "training__num_train_steps": "null",
    "training__num_train_epochs": 2,
    "training__save_steps": 4,
    "training__async_save": "false",  # or step 4 may not be there when the rank is killed at 7
    "training__eval_samples": 8,
    "training__eval_steps": 100,
    "training__eval_generate_samples": 0,
    "training__metric_for_best_model": "loss",
    "training__logging_steps": 1,
    "training__bf16": "false",
    "infra__sharding_stage": "zero3",
}


def arguments(folder: Path, rows: Path, *options: str) -> list[str]:
    settings = SETTINGS | ENGINES["fsdp"] | {"data__data_files": rows}
    return ["--config", CONFIG, *overrides(folder, **settings), *options]


def test_a_killed_run_goes_on_alike_on_another_number_of_ranks(runs: ForkedRuns, tmp_path: Path) -> None:
    rows = [{"instruction": f"add {i}", "input": i, "output": f"{i} and {i + 1}"} for i in range(80)]
    rows[7] = {**rows[7], "output": None}
    rows[8] = {**rows[8], "output": "long " * 40}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = runs.run(arguments(tmp_path / "whole", tmp_path / "rows.jsonl"), ranks=2).ended_with(0)
    killed = [{"kind": "killed_rank", "at": 7, "on_rank": 1}]
    first = runs.run(arguments(tmp_path / "cut", tmp_path / "rows.jsonl"), ranks=2, faults=killed)
    assert first.codes != [0, 0]
    second = runs.run(arguments(tmp_path / "cut", tmp_path / "rows.jsonl", "--resume", "auto")).ended_with(0)
    assert "optimizer steps" in whole.output
    told = "1 example was longer than data.max_encoder_length or data.max_decoder_length and left out (data.on_long_row"
    assert whole.output.count(told) == 2  # when it was counted, and at the end
    assert whole.output.count("1 row was not readable and left out (data.on_bad_row=skip)") == 1
    assert "optimizer steps" not in second.output  # it keeps those that were counted at the first start

    def trained(folder: Path) -> list[tuple[float, ...]]:
        names = ("step", "train/loss", "train/loss_SFT", "train/grad_norm", "train/epoch")
        lines = {line["step"]: line for line in metrics(folder) if "train/loss" in line}
        return [tuple(lines[step][name] for name in names) for step in sorted(lines)]

    steps = load_saved(tmp_path / "whole/config.yaml").training.num_train_steps
    assert 10 < steps == len(trained(tmp_path / "whole")) < 100
    for values, others in zip(trained(tmp_path / "cut"), trained(tmp_path / "whole"), strict=True):
        assert values == pytest.approx(others, abs=1e-5)
    for name in ("whole", "cut"):
        *_, last = (line for line in metrics(tmp_path / name) if "train/loss" in line)
        assert (last["data/bad_rows"], last["data/long_rows"]) == (1, 1)
