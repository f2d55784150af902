"""HostCollectives and the commit of a checkpoint between two real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gloo_ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks("commit_cases.py:agree", 2)
    for found in (first, second):
        assert found["exchange"] == ([3, 2], [1, -1])
        assert found["records"][0] == ["", "x"]
        assert found["fail_zero"] == found["fail_first"] == ("DataError", "rank 0 found nothing")
        assert found["fail_one"] == found["fail_second"] == ("DataError", "rank 1 found nothing")
    assert (first["records"][1], second["records"][1]) == (["", "y"], [])
    assert first["zero"] == second["zero"]
    assert (first["first"], second["first"]) == (0, 1)


def test_ranks_commit_together_and_agree_on_what_is_damaged(tmp_path: Path) -> None:
    found = run_ranks("commit_cases.py:save_and_find", 2, {"folder": str(tmp_path)})
    assert found[0] == found[1]
    assert found[0]["files"] == ["shard-0.bin", "shard-1.bin", "trainer.json"]
    assert found[0]["steps"] == (2, 1)
    for damage, says in (("flipped", "SHA-256"), ("missing", "missing, but the manifest lists it")):
        kind, message = found[0][damage]
        assert kind == "DamagedCheckpointError"
        assert "shard-1.bin" in message
        assert says in message


def test_collectives_of_training_go_on_under_a_save(tmp_path: Path) -> None:
    found = run_ranks("commit_cases.py:train_while_saving", 2, {"folder": str(tmp_path)})
    for rank in found:
        assert rank["total"] == 100
        assert rank["before"] == ([], False)
        assert rank["after"] == ([1], None)
        assert rank["seconds"] >= 1.5


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: it needs no file system of its own."""
    engines = ("shards", "deepspeed", "fsdp")
    found = run_ranks("commit_cases.py:fail_to_save", 2, {"folder": str(tmp_path), "engines": engines})
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(engines)
    for case, result in found[0].items():
        first, second, third = result["problems"]
        assert (first, third) == (None, None), case
        assert "[Errno 27]" in second, case
        assert "rank 1: " in second, case
        assert "rank 0" not in second, case
        assert "ulimit -f" in second, case
        if not case.startswith("shards"):
            assert str(tmp_path / case) in second, case
        assert re.search(r"takes about [\d,.]+ [KM]B and has [\d,.]+ (byte|[KMGT]?B).* free in /", second), second
        assert result["left"] == ["best", "latest", "step-00000001"], case
        assert result["best"] == "step-00000001", case
        assert result["steps"] == [1, 3], case


def test_a_folder_that_is_not_shared_is_refused_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks("commit_cases.py:unshared", 2, {"folder": str(tmp_path)})
    for kind, message in found:
        assert kind == "CheckpointError"
        assert "is not shared: rank 1 (" in message
