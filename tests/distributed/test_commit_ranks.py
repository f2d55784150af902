"""Agreement and the commit of a checkpoint between two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks("commit_cases.py:agree", 2)
    for found in (first, second):
        assert found["exchange"] == [[0, 1], [1, 1]]
        assert found["fail_zero"] == found["fail_first"] == ("DataError", "rank 0 found nothing")
        assert found["fail_one"] == found["fail_second"] == ("DataError", "rank 1 found nothing")
    assert first["zero"] == second["zero"]
    assert (first["first"], second["first"]) == (0, 1)


def test_ranks_commit_together_and_agree_on_what_is_damaged(tmp_path: Path) -> None:
    found = run_ranks("commit_cases.py:save_and_find", 2, {"folder": str(tmp_path)})
    assert found[0] == found[1]
    assert found[0]["files"] == ["shard-0.bin", "shard-1.bin", "trainer.json"]
    assert found[0]["steps"] == (2, 1)
    kind, message = found[0]["refused"]
    assert kind == "CheckpointError"
    assert "shard-1.bin" in message


def test_a_folder_that_is_not_shared_is_refused_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks("commit_cases.py:unshared", 2, {"folder": str(tmp_path)})
    for kind, message in found:
        assert kind == "CheckpointError"
        assert "ranks [1] do not see" in message
