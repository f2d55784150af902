"""`python -m ds_encdec.estimate_memory`: what it prints, what it answers as JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_encdec import cli
from ds_encdec.estimate_memory import main
from ds_encdec.memory.breakdown import CATEGORIES
from ds_encdec.memory.gpus import GIB, GPUS
from ds_encdec.memory.variants import HEADROOM, as_overrides


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def ask_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ask(capsys, *arguments, "--json"))
    return answer


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_it_answers_without_torch() -> None:
    """In a process of its own, as it is used; the answer is the default run's."""
    code = (
        "import sys; from ds_encdec.estimate_memory import main; code = main([]);"
        "print(*({'torch', 'transformers', 'deepspeed', 'datasets', 'huggingface_hub'} & set(sys.modules)),"
        "file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.strip()) == (0, "")
    assert "1,036,517,376 parameters" in result.stdout
    assert "8 x a100-80gb" in result.stdout


def test_the_module_ends_with_the_exit_code() -> None:
    command = [sys.executable, "-m", "ds_encdec.estimate_memory", "--gpu", "tpu-v5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--gpu tpu-v5: not a known GPU" in result.stderr


def test_the_table_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    text = ask(capsys)
    tables = [part for part in text.split("\n\n") if part.startswith(("DeepSpeed\n", "FSDP2\n"))]
    assert len(tables) == 2
    assert max(len(line) for table in tables for line in table.splitlines()) <= 120
    rows = tables[0].splitlines()
    (configured,) = (line for line in rows if line.startswith("*"))
    assert configured.split()[1:4] == ["zero3", "optimizer", "full"]
    assert sum(line.split()[2:] == ["-"] * 12 for line in rows) == 4  # zero0 twice, zero1, zero2
    assert "without sharding there is nothing to offload" in text
    assert "The configured run (DeepSpeed, zero3, offload optimizer, checkpointing full) fits" in text


def test_what_is_recommended_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    text = ask(capsys)
    recommended = next(line for line in text.splitlines() if line.startswith("Recommended with FSDP2"))
    arguments = recommended.partition(": ")[2].split()
    answer = ask_json(capsys)["engines"]["fsdp"]["recommendation"]
    assert arguments == as_overrides(answer["overrides"]).split()
    pasted = ask_json(capsys, *arguments)
    assert pasted["inputs"]["engine"] == "fsdp"
    assert pasted["configured"]["bytes"] == answer["bytes"]
    assert pasted["engines"]["fsdp"]["recommendation"]["overrides"] == {}


def test_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask_json(capsys, "--gpus", "16", "--nodes", "2", "--gpu", "h200")
    inputs = answer["inputs"]
    assert (inputs["gpus"], inputs["nodes"], inputs["gpu"]) == (16, 2, "h200")
    assert inputs["gpu_usable_bytes"] == GPUS["h200"].usable_bytes
    assert answer["parameters"] == {"total": 1_036_517_376, "trainable": 1_036_517_376}
    for engine in ("deepspeed", "fsdp"):
        rows = answer["engines"][engine]["rows"]
        assert len(rows) == 6 * 3 * 2
        for row in rows:
            assert row["exists"] is ("bytes" in row) is (not row["reason"])
            if row["exists"]:
                assert row["bytes"]["peak"] == pytest.approx(sum(row["bytes"][name] for name in CATEGORIES))
                room = (1 - HEADROOM) * inputs["gpu_usable_bytes"]
                assert row["fits"] is (row["bytes"]["peak"] <= room)
    (configured,) = (row for row in answer["engines"]["deepspeed"]["rows"] if row["configured"])
    assert configured == answer["configured"]


def test_parameters_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    for name, total in (("1.7B", 3_129_985_024), ("4B", 7_655_980_032), ("8B", 15_136_811_008)):
        answer = ask_json(capsys, "--model", f"Qwen/Qwen3-{name}", "--gpus", "64", "--nodes", "8")
        assert answer["parameters"]["total"] == total


def test_the_configuration_says_how_many_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_json(capsys, "--config", "ds_configs/qwen3_0.6b_ul2_1gpu.yaml")["inputs"]["gpus"] == 1
    assert ask_json(capsys, "infra.num_gpus=4")["inputs"]["gpus"] == 4


def test_sizes_written_out_need_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask_json(capsys, "--config", "ds_configs/quickstart.yaml", "--gpus", "1")
    assert answer["inputs"]["model"] is None
    assert answer["parameters"]["total"] < 100_000_000


def test_where_nothing_fits_it_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP2 adds up unsharded float32 gradients, unless told to reduce after each micro-batch."""
    arguments = ("--model", "Qwen/Qwen3-8B", "--gpus", "1", "--gpu", "24GB", "infra.distributed_type=fsdp")
    text = ask(capsys, *arguments)
    assert "FSDP2: nothing fits." in text
    assert "Most of it is gradients" in text
    assert "This fits: infra.fsdp_reduce_every_micro_batch=true (" in text
    answer = ask_json(capsys, *arguments)
    assert answer["gpus_needed"] is None
    assert ask_json(capsys, *arguments, "infra.fsdp_reduce_every_micro_batch=true")["configured"]["fits"]


def test_more_gpus_are_counted_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "Qwen/Qwen3-4B", "--gpu", "a100-40gb", "--host-memory", "100GiB")
    text = ask(capsys, *arguments, "--gpus", "1")
    answer = ask_json(capsys, *arguments, "--gpus", "1")
    needed = answer["gpus_needed"]
    assert "which it has, and" in text  # the GPU would do, the host not
    assert answer["nearest"] == []
    assert f"On {needed} of these GPUs a setting of the table fits." in text
    for gpus, fits in ((needed, True), (needed // 2, False)):
        found = ask_json(capsys, *arguments, "--gpus", str(gpus), "--nodes", str(gpus))
        assert (found["engines"]["deepspeed"]["recommendation"] is not None) is fits


def test_the_host_is_judged_only_if_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_json(capsys)["configured"]["fits"]
    answer = ask_json(capsys, "--host-memory", "16GiB")
    assert answer["inputs"]["host_memory_bytes"] == 16 * GIB
    assert not answer["configured"]["fits"]
    assert "it has 16.0" in ask(capsys, "--host-memory", "16GiB")


def test_adapters_are_said_to_be_a_thought(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask_json(capsys, "--lora-rank", "8")
    assert answer["parameters"] == {"total": 1_036_517_376 + 10_092_544, "trainable": 10_092_544}
    assert "do not train adapters alone yet" in ask(capsys, "--lora-rank", "8")


def test_auto_is_the_largest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ("training.per_device_train_batch_size=auto", "training.activation_checkpointing=none")
    text = ask(capsys, *auto)
    answer = ask_json(capsys, *auto)
    batch = answer["inputs"]["per_device_train_batch_size"]
    assert answer["configured"]["fits"]
    assert f"fits by this estimate, {batch}." in text
    larger = ask_json(capsys, auto[1], f"training.per_device_train_batch_size={2 * batch}")
    assert not larger["configured"]["fits"]


def test_a_gpu_without_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no bfloat16" in ask(capsys, "--gpu", "v100-32gb")
    assert "has no bfloat16" not in ask(capsys, "--gpu", "v100-32gb", "training.bf16=false")


def test_a_trace_stands_beside_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {
        "vocab_size": 1024,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    }
    arguments = [f"model.architecture.{name}={size}" for name, size in tiny.items()]
    arguments += ["infra.distributed_type=fsdp", "infra.offload_optimizer=none"]
    arguments += ["data.max_encoder_length=64", "data.max_decoder_length=64", "training.eval_samples=0"]
    options = ("--config", "ds_configs/quickstart.yaml", "--gpus", "2", "--trace")
    answer = ask_json(capsys, *options, *arguments)
    traced, formula = answer["trace"]["bytes"], answer["configured"]["bytes"]
    assert traced["optimizer"] == pytest.approx(formula["optimizer"], rel=0.01)
    assert traced["master_weights"] == pytest.approx(formula["master_weights"], rel=0.01)


def test_the_verb_is_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    expected = ask(capsys, "--gpus", "2")
    assert cli.main(["estimate-memory", "--gpus", "2"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--gpu", "h100"], ["--gpu h100: not a known GPU", "h100-80gb", "mi300x"]),
        (["--gpus", "0"], ["--gpus 0: must be at least 1"]),
        (["--gpus", "-8", "--nodes", "-1"], ["--gpus -8: must be at least 1", "--nodes -1: must be at least 1"]),
        (["--lora-rank", "0"], ["--lora-rank 0: must be at least 1"]),
        (["--gpus", "8", "--nodes", "3"], ["--gpus 8 --nodes 3", "multiple of 3"]),
        (["--host-memory", "lots"], ["--host-memory lots: not a size"]),
        (
            ["--model", "Qwen/Qwen3-7B"],
            ["Qwen/Qwen3-7B is not a local folder", "Did you mean Qwen/Qwen3-", "architecture"],
        ),
        (["--model", "/nowhere"], ["/nowhere is not a local folder"]),
        (["training.batch=4"], ["training.batch", "unknown key"]),
        (["infra.sharding_stage=zero0"], ["without sharding there is nothing to offload"]),
        (["data.num_lanes=63"], ["63 micro-batches", "cannot be shared out evenly to 8 GPUs"]),
        (["training.global_batch_size=20"], ["5 micro-batches", "evenly to 8 GPUs"]),
        (
            ["infra.sharding_stage=zero3_hybrid", "infra.hybrid_shard_size=3"],
            ["infra.hybrid_shard_size=3 does not divide 8 GPUs"],
        ),
        (
            ["--gpu", "tpu", "--nodes", "0", "--host-memory", "x", "training.bf16=maybe"],
            ["--gpu tpu", "--nodes 0", "--host-memory x", "training.bf16"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], messages: list[str]) -> None:
    error = refuse(capsys, *arguments)
    for message in messages:
        assert message in error


def test_a_damaged_model_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refuse(capsys, "--model", str(tmp_path))
