"""Both engines beside a frozen teacher: they train like plain torch, and no checkpoint or export has its weights."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from distilled_cases import LANES, STEPS, lanes, oracle_run
from engine_plan import BF16, HYBRID_OF_TWO, OFFLOAD, OFFLOAD_ALL, RECOMPUTE, fsdp, zero
from gloo_ranks import run_ranks
from small_run import LORA, SHORT_MODEL
from taught import teacher_folder

from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.registry.engines import EngineName

pytestmark = pytest.mark.distributed

FROZEN = {"freeze": ("encoder.*", "shared.weight")}
RUNS: dict[tuple[EngineName, int], dict[str, dict[str, Any]]] = {
    ("deepspeed", 1): {"zero0": zero(0)},
    ("deepspeed", 2): {
        "zero0": zero(0),
        "zero1": zero(1),
        "zero2-offload": zero(2, **OFFLOAD),
        "zero3": zero(3),
        "zero3-offload-all-recompute": zero(3, **OFFLOAD_ALL, **RECOMPUTE),
        "zero1-freeze": zero(1, **FROZEN),
        "zero3-freeze": zero(3, **FROZEN),
        "zero3-lora": zero(3, **LORA),
        "zero3-bf16": zero(3, **BF16),
        "zero1-bf16": zero(1, **BF16),
    },
    ("fsdp", 1): {"zero0": fsdp(0)},
    ("fsdp", 2): {
        "zero0": fsdp(0),
        "zero2": fsdp(2),
        "zero3": fsdp(3),
        "zero3-offload-recompute": fsdp(3, **OFFLOAD, **RECOMPUTE),
        "zero3-freeze": fsdp(3, **FROZEN),
        "zero0-lora": fsdp(0, **LORA),
        "zero3-bf16": fsdp(3, **BF16),
    },
    ("fsdp", 4): {"zero3": fsdp(3), "zero3_hybrid": {**fsdp(3), **HYBRID_OF_TWO}},
}
# Who goes on from whose checkpoint, saved on two ranks.
ARRIVALS: dict[tuple[EngineName, int], dict[str, tuple[EngineName, str, dict[str, Any]]]] = {
    ("deepspeed", 1): {
        "zero2": ("fsdp", "zero3", zero(2)),
        "zero0-freeze": ("deepspeed", "zero3-freeze", zero(0, **FROZEN)),
    },
    ("deepspeed", 4): {"zero3": ("deepspeed", "zero1", zero(3)), "zero1-lora": ("fsdp", "zero0-lora", zero(1, **LORA))},
    ("fsdp", 1): {"zero3": ("deepspeed", "zero0", fsdp(3))},
    ("fsdp", 4): {
        "zero3": ("deepspeed", "zero3", fsdp(3)),
        "zero3-freeze": ("deepspeed", "zero1-freeze", fsdp(3, **FROZEN)),
    },
}
EACH = [(*start, case) for start, cases in RUNS.items() for case in cases]


@functools.cache
def scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="teacher-"))
    teacher_folder(folder / "teacher")
    return folder


def folder_of(engine: EngineName, case: str) -> str:
    return str(scratch() / f"{engine}-{case}")


@functools.cache
def results(engine: EngineName, ranks: int) -> list[dict[str, Any]]:
    places = {"teacher": str(scratch() / "teacher")}
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for case, given in RUNS.get((engine, ranks), {}).items():
        saves = {"directory": folder_of(engine, case)} if ranks == 2 else {}
        cases.append((case, "training", places | given | saves))
    for case, (source, saved, given) in ARRIVALS.get((engine, ranks), {}).items():
        results(source, 2)  # must be there
        cases.append((f"from {case}", "going_on", places | given | {"directory": folder_of(source, saved)}))
    return run_ranks("distilled_cases.py:run_cases", ranks, {"cases": cases}, engine)


@functools.cache
def oracle(given: str) -> dict[str, Any]:
    return oracle_run(str(scratch() / "teacher"), **json.loads(given))


def oracle_of(given: dict[str, Any]) -> dict[str, Any]:
    return oracle(json.dumps({name: given[name] for name in ("freeze", "lora") if name in given}))


def assert_steps_like(found: dict[str, Any], expected: list[dict[str, Any]], relative: float) -> None:
    for mine, theirs in zip(found["steps"], expected, strict=True):
        for name in ("total", "grad_norm", "sums"):
            assert mine[name] == pytest.approx(theirs[name], rel=relative), name


@pytest.mark.parametrize(("engine", "ranks", "case"), EACH)
def test_losses_gradients_and_weights_are_those_of_plain_torch(engine: EngineName, ranks: int, case: str) -> None:
    given = RUNS[engine, ranks][case]
    expected, is_low = oracle_of(given), "bf16" in given
    for rank in results(engine, ranks):
        assert_steps_like(rank[case], expected["steps"], 0.03 if is_low else 1e-5)
        if not is_low:
            assert rank[case]["weights"].keys() == expected["weights"].keys()
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(rank[case]["weights"][name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(("engine", "ranks", "case"), EACH)
def test_the_teacher_stays_as_it_was_and_is_not_exported(engine: EngineName, ranks: int, case: str) -> None:
    given = RUNS[engine, ranks][case]
    stored, names = teacher_weights(), list(parameter_shapes(SHORT_MODEL))
    for rank in results(engine, ranks):
        assert rank[case]["exported"] == names
        found = rank[case]["teacher"]
        assert found.keys() >= {"shared.weight", "decoder.layers.1.mlp.up_proj.weight", "decoder.norm.weight"}
        for name, weight in found.items():
            expected = stored[name].bfloat16().float() if "bf16" in given else stored[name]
            assert torch.equal(weight, expected), name


def teacher_weights() -> dict[str, torch.Tensor]:
    """The teacher's tensors by our names."""
    from safetensors.torch import load_file

    stored = load_file(scratch() / "teacher" / "model.safetensors")
    ours = {f"decoder.{name.removeprefix('model.')}": one for name, one in stored.items()}
    return {
        **ours,
        "shared.weight": ours["decoder.embed_tokens.weight"],
        "encoder.norm.weight": ours["decoder.norm.weight"],
        "lm_head.weight": ours.get("decoder.lm_head.weight", ours["decoder.embed_tokens.weight"]),
    }


@pytest.mark.parametrize(("engine", "case"), [(engine, case) for engine, ranks, case in EACH if ranks == 2])
def test_no_file_of_a_checkpoint_has_a_name_of_the_teacher(engine: EngineName, case: str) -> None:
    results(engine, 2)
    files = [path for path in Path(folder_of(engine, case)).rglob("*") if path.is_file()]
    assert len(files) > 1
    for path in files:
        assert b"teacher." not in path.read_bytes(), path
    assert sum(path.stat().st_size for path in files) < 1_200_000  # the teacher has 100,000 parameters


@pytest.mark.parametrize(
    ("engine", "ranks", "case"), [(*start, case) for start, cases in ARRIVALS.items() for case in cases]
)
def test_another_engine_on_other_ranks_goes_on_like_the_unbroken_run(engine: EngineName, ranks: int, case: str) -> None:
    _, _, given = ARRIVALS[engine, ranks][case]
    expected = oracle_of(given)
    for rank in results(engine, ranks):
        found = rank[f"from {case}"]
        assert_steps_like(found, expected["steps"][1:], 1e-5)
        assert not any(name.startswith("teacher.") for name in found["shapes"])
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-4, msg=name)


def test_evaluation_has_the_same_figures_on_any_number_of_ranks() -> None:
    alone = results("deepspeed", 1)[0]["zero0"]["evaluated"]
    for engine, ranks in (("deepspeed", 2), ("fsdp", 2)):
        for rank in results(engine, ranks):
            torch.testing.assert_close(
                torch.tensor(rank["zero3"]["evaluated"]), torch.tensor(alone), rtol=1e-5, atol=1e-4
            )
    assert len(alone) == LANES == len(lanes(0))
    assert len(results("deepspeed", 1)[0]["zero0"]["steps"]) == STEPS
