"""The results of all engine cases: each world size is started once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_plan import cases
from gloo_ranks import RankFailure, run_ranks

Results = Callable[..., Any]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the resume cases leave their checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def engine_results(checkpoints: Path) -> Results:
    """`engine_results(world_size, case)` → the case's result on every rank."""

    @functools.cache
    def run(world_size: int) -> list[dict[str, Any]] | RankFailure:
        plan = cases(world_size, checkpoints)
        try:
            # 30 to 90 seconds on two idle cores.
            return run_ranks("engine_cases.py:run_cases", world_size, {"cases": plan}, timeout_seconds=600)
        except RankFailure as failure:
            return failure  # cached like a result: every test would wait for it again

    def result(world_size: int, case: str) -> list[Any]:
        ranks = run(world_size)
        if isinstance(ranks, RankFailure):
            raise ranks
        found = [rank[case] for rank in ranks]
        for traceback in found:
            assert not isinstance(traceback, str), traceback
        return found

    return result
