"""Ctrl-C and SIGTERM in every verb: one line, a code that says so, no traceback, and nothing half-made is left."""

from pathlib import Path
from typing import NamedTuple

import pytest
from forked_runs import ForkedRuns, arguments, status
from tiny_run import QUICKSTART

from ds_encdec.checkpoint.folder import committed_steps

pytestmark = [pytest.mark.distributed]


class Verb(NamedTuple):
    words: str  # with RUN, CHECKPOINT, MODEL and OUT for the paths
    function: str  # behind which the signal comes
    number: str = "SIGINT"
    code: int = 130


EXPORTS = "ds_encdec.exports.hugging_face"
VERBS = [
    Verb("export CHECKPOINT OUT", f"{EXPORTS}:write_safetensors_folder"),
    Verb("export CHECKPOINT OUT", f"{EXPORTS}:write_safetensors_folder", "SIGTERM", 143),
    Verb("average RUN OUT", f"{EXPORTS}:write_tokenizer"),
    Verb("init-model --from MODEL --out OUT", f"{EXPORTS}:write_safetensors_folder", "SIGTERM", 143),
    Verb("report RUN --out OUT", "ds_encdec.report.write:read_run"),
    Verb(
        "evaluate --model MODEL --config CONFIG --split validation --out OUT data.objective=ul2",
        "ds_encdec.evaluate.evaluation:open_model",
        code=75,
    ),
    Verb("generate --model MODEL --text x", "ds_encdec.evaluate.generation:generate_batch"),
    Verb("doctor --config CONFIG", "ds_encdec.commands.doctor:choose_device"),
    Verb("plan --config CONFIG", "ds_encdec.commands.plan:estimate"),
    Verb("phases --config CONFIG --dry-run", "ds_encdec.commands.plan:plan_of_phases"),
    Verb("sanity-check --config CONFIG", "ds_encdec.commands.sanity_check:join_ranks"),
    Verb("prepare --config CONFIG --out OUT", "ds_encdec.training.run_model:run_tokenizer", code=75),
]


@pytest.fixture(scope="module")
def run(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    settings = {"training__export_at_end": "true", "training__num_train_steps": 9}
    runs.run(arguments(folder, "fsdp", **settings)).ended_with(0)
    return folder


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: f"{verb.words.split()[0]} {verb.number}")
def test_an_interrupted_verb_ends_in_a_line_and_leaves_nothing(
    runs: ForkedRuns, run: Path, tmp_path: Path, verb: Verb
) -> None:
    paths = {"RUN": run, "CHECKPOINT": run / "checkpoints" / "final", "MODEL": run / "export" / "final"}
    paths |= {"OUT": tmp_path / "out", "CONFIG": Path(QUICKSTART)}
    words = [str(paths.get(word, word)) for word in verb.words.split()]
    fault = {"kind": "signalled_in", "function": verb.function, "number": verb.number}
    ended = runs.run(words, faults=[fault], program="cli").ended_with(verb.code)
    assert not ended.left
    assert "Traceback" not in ended.output
    *_, last = ended.output.splitlines()
    if verb.code == 75:
        assert "are kept, and the same command continues" in last
    else:
        assert last == f"error: stopped by {verb.number} before it was done; no file is left half-written"
    assert not [*tmp_path.rglob("*.tmp"), *run.rglob("*.tmp")]
    assert verb.code == 75 or not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_second_ctrl_c_ends_a_run_in_a_line(runs: ForkedRuns, tmp_path: Path) -> None:
    fault = {"kind": "interrupted_twice", "at": 2}
    settings = {"training__async_save": "false", "training__num_train_steps": 9, "training__save_steps": 9}
    ended = runs.run(arguments(tmp_path / "run", "fsdp", **settings), faults=[fault]).ended_with(130)
    assert "Traceback" not in ended.output
    assert status(tmp_path / "run")["exit_code"] == 130
    assert not committed_steps(tmp_path / "run" / "checkpoints")
