"""Wrong token ids on two real ranks: where two runs part is found, and what no model has ends the run."""

import signal
from pathlib import Path
from typing import Any

import forked_runs
import pytest
from forked_runs import ForkedRuns
from tiny_run import QUICKSTART, overrides

from ds_encdec import cli
from ds_encdec.checkpoint.folder import verify_checkpoints

pytestmark = [pytest.mark.distributed]


def arguments(folder: Path, *options: str, **changes: Any) -> list[str]:
    settings = {"data__num_lanes": 4, "training__num_train_steps": 8, "training__async_save": "false"}
    return forked_runs.arguments(folder, "fsdp", *options, **settings | changes)


def wrong(token: int, at: int = 5) -> list[dict[str, Any]]:
    return [{"kind": "wrong_token", "at": at, "on_rank": 1, "token": token}]


def test_two_runs_part_at_the_step_and_the_rank_of_a_wrong_token(
    runs: ForkedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not at all where one was killed and went on: steps 3, 6 and 8 are saved, 2, 4, 6 and 8 logged."""
    whole, killed, other = (str(tmp_path / name) for name in ("whole", "killed", "other"))
    runs.run(arguments(Path(whole)), ranks=2).ended_with(0)
    kill = [{"kind": "killed_rank", "at": 6, "on_rank": rank} for rank in (0, 1)]
    runs.run(arguments(Path(killed)), ranks=2, faults=kill).ended_with(-signal.SIGKILL)
    runs.run(arguments(Path(killed), "--resume", "auto"), ranks=2).ended_with(0)
    assert cli.main(["compare", whole, killed]) == 0
    assert capsys.readouterr().out == "Equal: the tokens of 8 data steps, and 4 lines of metrics.\n"

    runs.run(arguments(Path(other)), ranks=2, faults=wrong(900)).ended_with(0)
    assert cli.main(["compare", whole, other]) == 10
    told = capsys.readouterr().out
    ranks = f"rank 1 in {whole}, rank 1 in {other}"
    assert f"Data step 5 is the first with other tokens, in lane 1 alone ({ranks}).\n" in told


def test_an_id_that_no_model_has_ends_the_run_and_the_steps_before_are_saved(runs: ForkedRuns, tmp_path: Path) -> None:
    result = runs.run(arguments(tmp_path), ranks=2, faults=wrong(1024)).ended_with(4)
    assert "(lane 1) has the token id 1024, but the tokenizer's are 0 to 1023" in result.output
    assert "Traceback" not in result.output
    assert max(checkpoint.manifest.step for checkpoint in verify_checkpoints(tmp_path)) == 4


def test_a_prepared_file_damaged_in_its_middle_ends_the_run(runs: ForkedRuns, tmp_path: Path) -> None:
    given = overrides(tmp_path / "run", data__prepared_dir=tmp_path / "data")
    assert cli.main(["prepare", QUICKSTART, "--num-proc", "1", *given]) == 0
    (shard,) = (tmp_path / "data").glob("*/*.arrow")
    content = bytearray(shard.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter : 997] = bytes(len(range(quarter, 3 * quarter, 997)))
    shard.write_bytes(content)
    settings = {"data__prepared_dir": tmp_path / "data", "data__preprocessing_num_workers": 1}
    result = runs.run(arguments(tmp_path / "run", **settings), ranks=2).ended_with(4)
    assert f"{shard} is damaged: delete it, and run `ds-encdec prepare` again" in result.output
