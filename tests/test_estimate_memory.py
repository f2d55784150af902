"""`python -m ds_encdec.estimate_memory`: what it prints, what it answers as JSON, and what it refuses."""

import contextlib
import functools
import io
import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ds_encdec.base.quantities import GIB, gib
from ds_encdec.base.types import ConfigError
from ds_encdec.commands.plan import plan_run
from ds_encdec.config.schema import load_config
from ds_encdec.estimate_memory import main
from ds_encdec.memory import question
from ds_encdec.memory.breakdown import Breakdown
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.expected import ExpectedMemory
from ds_encdec.memory.gpus import GPUS, grow_segments, parse_bytes, parse_gpu, peak_flops
from ds_encdec.memory.job import run_sizes
from ds_encdec.memory.question import planned_job
from ds_encdec.memory.variants import HEADROOM, Variant, as_overrides

DOCS = Path(__file__).parents[1] / "docs"
ON_CPUS = ("--config", "ds_configs/quickstart.yaml", "infra.device=cpu")
TIGHT = ("--model", "Qwen/Qwen3-8B", "--gpus", "1", "--gpu", "24GB", "--host-memory", "1TB")
WASTEFUL = ("model.loss_chunk_tokens=32768", "training.per_device_eval_batch_size=32")


@functools.cache
def ask(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output, patch.object(question, "has_gpu", lambda: True):
        assert main(arguments) == 0
    return output.getvalue()


def ask_json(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ask(*arguments, "--json"))
    return answer


def test_the_answers(golden: Callable[[object], None]) -> None:
    for arguments in (
        (),
        ("--all", "--host-memory", "16GiB"),
        (*TIGHT, *WASTEFUL),
        ("--gpu", "v100-32gb"),
        ON_CPUS,
        (*ON_CPUS, "--host-memory", "1GiB"),
    ):
        golden(text := ask(*arguments))
        tables = [part for part in text.split("\n\n") if part.startswith(("DeepSpeed, GiB", "FSDP2, GiB"))]
        assert all(len(line) <= 100 for table in tables for line in table.splitlines())


def test_ranks_on_cpus_are_judged_by_their_hosts() -> None:
    config = load_config(Path("ds_configs/quickstart.yaml"), ["infra.device=cpu"])
    job = planned_job(config, run_sizes(config), nodes=1)
    needed = Variant(job, estimate(job)).node_bytes
    assert f"host {gib(needed)} per node" in str(ExpectedMemory(job, estimate(job)))
    assert plan_run(config)["host_bytes_per_node"] == needed < 2 * GIB
    assert f"Each host of 2 ranks holds {needed / GIB:.1f} GiB at its worst moment" in ask(*ON_CPUS)
    for size, fits in (("32GiB", True), ("1GiB", False)):
        found = ask_json(*ON_CPUS, "--host-memory", size)
        assert (found["inputs"]["device"], found["inputs"]["gpu"]) == ("cpu", None)
        assert found["configured"]["fits"] == fits


def test_it_answers_without_torch() -> None:
    code = (
        "import sys; from ds_encdec.cli import main; code = main(['estimate-memory']);"
        "print(*({'torch', 'transformers', 'deepspeed', 'datasets', 'huggingface_hub'} & set(sys.modules)),"
        "file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr.strip()) == (0, "")
    assert set(ask().splitlines()) <= set(result.stdout.splitlines())


def test_the_module_ends_with_the_exit_code_and_its_reader_may_leave() -> None:
    for arguments, code in (("--gpu tpu-v5", 2), ("| true", 0)):
        words = ["bash", "-c", f"set -o pipefail; {sys.executable} -m ds_encdec.estimate_memory {arguments}"]
        result = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert (result.returncode, result.stdout, not result.stderr) == (code, "", code == 0)


def test_json_has_what_the_table_has() -> None:
    answer = ask_json("--gpus", "16", "--nodes", "2", "--gpu", "h200")
    inputs = answer["inputs"]
    assert (inputs["gpus"], inputs["nodes"], inputs["gpu"]) == (16, 2, "h200")
    assert inputs["gpu_usable_bytes"] == GPUS["h200"].usable_bytes
    # Both stacks of Qwen3-0.6B less an encoder layer and the encoder's norm.
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert answer["parameters"] == dict.fromkeys(("total", "trainable"), 1_036_517_376 - layer - 1024)
    for engine, settings in (("deepspeed", 6 * 3), ("fsdp", 5 * 2)):  # FSDP2's zero1 is zero2, and it offloads all
        rows = answer["engines"][engine]["rows"]
        assert len(rows) == settings * 2
        for row in rows:
            assert row["exists"] is ("bytes" in row) is (not row["reason"])
            if row["exists"]:
                assert row["bytes"]["peak"] == pytest.approx(sum(row["bytes"][name] for name in Breakdown._fields))
                assert row["fits"] is (row["bytes"]["peak"] <= (1 - HEADROOM) * inputs["gpu_usable_bytes"])
    (configured,) = (row for row in answer["engines"]["deepspeed"]["rows"] if row["configured"])
    assert configured == answer["configured"]


def test_the_other_engine_is_not_refused_for_what_it_lacks() -> None:
    own = ("infra.distributed_type=fsdp", "infra.fsdp_reduce_every_micro_batch=true", "training.torch_compile=true")
    answer = ask_json(*own)
    assert answer["engines"]["deepspeed"]["recommendation"] is not None
    assert any("torch_compile" in remark for remark in answer["remarks"])


def test_where_nothing_fits_the_nearest_settings_do() -> None:
    answer = ask_json(*TIGHT, *WASTEFUL)["engines"]["deepspeed"]
    assert answer["recommendation"] is None
    assert answer["nearest"][0]["fits"]
    changed = {**dict(pair.split("=") for pair in WASTEFUL), **answer["nearest"][0]["overrides"]}
    assert ask_json(*TIGHT, *as_overrides(changed).split())["configured"]["fits"]


def test_auto_is_the_largest_that_fits() -> None:
    sized = ("--model", "Qwen/Qwen3-4B", "--gpu", "a100-40gb")
    auto = (*sized, "training.per_device_train_batch_size=auto")
    answer = ask_json(*auto)
    batch, steps = (answer["inputs"][name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    assert batch * steps == 32
    assert batch > 4
    assert answer["configured"]["fits"]
    assert f"fits by this estimate, {batch}." in answer["remarks"][0]
    larger = {"training.per_device_train_batch_size": 2 * batch, "training.gradient_accumulation_steps": steps // 2}
    assert not ask_json(*sized, *as_overrides(larger).split())["configured"]["fits"]


def test_a_gpu_without_bfloat16_is_judged_by_what_it_can_run() -> None:
    answer = ask_json("--gpu", "v100-32gb")
    assert (answer["configured"]["fits"], answer["configured"]["short_of"]) == (False, "does not run")
    best = answer["engines"]["deepspeed"]["recommendation"]["overrides"]
    assert (best["training.bf16"], best["training.fp16"]) == (False, True)
    half = ("--gpu", "v100-32gb", "training.bf16=false", "training.fp16=true")
    found = [ask_json(*half, f"model.use_flash_attention={flash}")["configured"] for flash in ("true", "false")]
    assert found[0] == found[1]
    assert found[0]["short_of"] != "does not run"


REFUSED = """
--gpu h100
--host-memory 64
--gpu h200 infra.device=cpu
infra.offload_optimizer=nvme
training.per_device_train_batch_size=auto training.global_batch_size=100
--gpus -8 --nodes -1
--gpus 8 --nodes 3
--model Qwen/Qwen3-7B
--model /nowhere
--model damaged
training.batch=4
data.num_lanes=63
training.global_batch_size=20
infra.sharding_stage=zero3_hybrid infra.hybrid_shard_size=3
--gpu tpu --nodes 0 --host-memory x training.bf16=maybe
"""


def test_bad_input(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[object], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged").mkdir()
    Path("damaged/config.json").write_text("{")
    for line in REFUSED.strip().splitlines():
        print("\n>", line, file=sys.stderr)
        assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    golden(output.err)


def test_seven_billion_parameters_on_one_gpu_of_24_gb() -> None:
    page = (DOCS / "estimate-memory.md").read_text(encoding="utf-8")
    section = page.partition("## 7 B parameters on one GPU of 24 GB")[2].partition("\n## ")[0]
    command, printed = section.split("```")[1::2]
    arguments = shlex.split(command)[3:]
    assert set(printed.strip().splitlines()) <= set(ask(*arguments).splitlines())
    found = ask_json(*arguments)
    assert found["parameters"]["trainable"] > 7e9
    assert found["configured"]["fits"]
    assert found["inputs"]["gpu_usable_bytes"] < 24e9 * 1.1


def test_the_picture_in_the_readme_shows_these_figures() -> None:
    drawn: dict[str, str] = defaultdict(str)
    for y, text in re.findall(r'<text [^>]*\by="([\d.]+)"[^>]*>([^<]*)</text>', (DOCS / "estimate.svg").read_text()):
        drawn[y] += f" {unescape(text)}"
    rows = [line for line in ask().splitlines() if re.match("[ *] zero", line)]
    assert len(rows) > 10
    assert {" ".join(row.split()) for row in rows} <= {" ".join(line.split()) for line in drawn.values()}


def test_a_name_has_less_than_its_number() -> None:
    for name, written in (("a100-80gb", 80), ("a100-40gb", 40), ("h200", 141)):
        assert 0.98 * written * 1e9 < parse_gpu(name).usable_bytes < written * GIB
    assert parse_gpu("H100-80GB") is parse_gpu(" h100_80gb ") is GPUS["h100-80gb"]  # as people write them
    assert [name for name, gpu in GPUS.items() if not gpu.has_bf16] == ["t4", "v100-16gb", "v100-32gb"]


def test_sizes() -> None:
    for text, expected in (("80GB", 8e10), ("80GiB", 80 * GIB), ("85899345920", 80 * GIB), ("1.5 TiB", 1536 * GIB)):
        assert parse_bytes(text) == parse_gpu(text).usable_bytes == expected
    assert [parse_bytes(text) for text in ("80G", "eighty", "-80GB", "")] == [None] * 4


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    for text, message in (("h100", "Did you mean h100-80gb or h100-nvl"), ("tpu", "Known are"), ("80", "80GB, 80GiB")):
        with pytest.raises(ConfigError, match=message):
            parse_gpu(text)


def test_peaks_by_the_names_of_devices() -> None:
    for name, tflops in (("H100 80GB HBM3", 989), ("H100 PCIe", 756), ("A100-SXM4-80GB", 312), ("L40S", 362)):
        assert peak_flops(f"NVIDIA {name}") == tflops * 1e12, name
    assert [peak_flops(name) for name in ("NVIDIA A10G", "NVIDIA A1000", "cpu")] == [None] * 3


def test_segments_grow_unless_the_user_has_said_how_memory_is_held() -> None:
    name, older = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given, found in (
        ({}, {name: "expandable_segments:True"}),
        ({name: ""}, {name: ""}),
        ({older: "backend:cudaMallocAsync"}, {older: "backend:cudaMallocAsync"}),
    ):
        grow_segments(environ := dict(given))
        assert environ == found
