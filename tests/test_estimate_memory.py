"""`python -m ds_encdec.estimate_memory`: what it prints, what it answers as JSON, and what it refuses."""

from __future__ import annotations

import argparse
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
from rich.console import Console

from ds_encdec.base.arguments import add
from ds_encdec.base.quantities import GIB, gib
from ds_encdec.commands.plan import plan_run
from ds_encdec.config.schema import load_config
from ds_encdec.estimate_memory import ARGUMENTS, main
from ds_encdec.memory import question
from ds_encdec.memory.answer import estimate_tables, show
from ds_encdec.memory.breakdown import Breakdown
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.expected import ExpectedMemory
from ds_encdec.memory.gpus import GPUS
from ds_encdec.memory.job import run_sizes
from ds_encdec.memory.question import planned_job, read_request
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
    """The answer comes first; below each table stands why some settings do not exist."""
    for arguments in (
        (),
        ("--all", "--host-memory", "16GiB"),
        (*TIGHT, *WASTEFUL),
        ("--gpu", "v100-32gb"),
        ("training.bf16=false", "training.fp16=true"),
        ON_CPUS,
        (*ON_CPUS, "--host-memory", "1GiB"),
    ):
        golden(text := ask(*arguments))
        tables = [part for part in text.split("\n\n") if part.startswith(("DeepSpeed, GiB", "FSDP2, GiB"))]
        assert all(len(line) <= 100 for table in tables for line in table.splitlines())


def test_ranks_on_cpus_are_judged_by_their_hosts() -> None:
    """The memory of a host is that which the run itself says at its start, and what a plan says."""
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


def test_the_module_ends_with_the_exit_code() -> None:
    command = [sys.executable, "-m", "ds_encdec.estimate_memory", "--gpu", "tpu-v5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--gpu tpu-v5: not a known GPU" in result.stderr


@pytest.mark.parametrize(("width", "is_whole"), [(40, False), (100, True)])
def test_no_figure_is_cut_on_a_terminal(width: int, is_whole: bool) -> None:
    parser = argparse.ArgumentParser()
    add(parser, ARGUMENTS)
    asked = read_request(parser.parse_args(["--model", "Qwen/Qwen3-8B", "--gpu", "24GB"]), [])
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    show(console, asked, estimate_tables(asked), everything=False)
    text = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "…" not in text
    (row,) = (line.rstrip() for line in text.splitlines() if line.startswith("* zero3"))
    assert row.endswith(("no: GPU", "yes"))
    assert (len(row) <= width) is is_whole


def test_json_has_what_the_table_has() -> None:
    answer = ask_json("--gpus", "16", "--nodes", "2", "--gpu", "h200")
    inputs = answer["inputs"]
    assert (inputs["gpus"], inputs["nodes"], inputs["gpu"]) == (16, 2, "h200")
    assert inputs["gpu_usable_bytes"] == GPUS["h200"].usable_bytes
    assert answer["parameters"] == {"total": 1_036_517_376, "trainable": 1_036_517_376}
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


def test_the_configuration_says_how_many_gpus_and_may_write_out_the_sizes() -> None:
    assert ask_json("--config", "ds_configs/qwen3_0.6b_ul2_1gpu.yaml")["inputs"]["gpus"] == 1
    assert ask_json("--gpus", "8", "infra.num_gpus=4")["inputs"]["gpus"] == 4  # options are overrides; the last counts
    answer = ask_json("--config", "ds_configs/quickstart.yaml", "--gpus", "1")
    assert (answer["inputs"]["model"], answer["inputs"]["gpus"]) == (None, 1)
    assert answer["parameters"]["total"] < 100_000_000


def test_the_other_engine_is_not_refused_for_what_it_lacks() -> None:
    """Settings that only FSDP2 has are given up for DeepSpeed; what neither a row nor a change can mend is said."""
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
    on_disk = ("--gpus", "1", "--gpu", "4GB", "infra.offload_optimizer=nvme", "infra.nvme_path=/local")
    assert ask_json(*on_disk)["engines"]["deepspeed"]["nearest"] == []


def test_auto_is_the_largest_that_fits() -> None:
    """The next larger one of the same global batch does not."""
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
    # What is recommended keeps the global batch where it is pasted.
    for table in answer["engines"].values():
        pasted = ask_json(*auto, *as_overrides(table["recommendation"]["overrides"]).split())["inputs"]
        assert pasted["per_device_train_batch_size"] * pasted["gradient_accumulation_steps"] == 32
        assert pasted["per_device_train_batch_size"] == table["recommendation"]["per_device_train_batch_size"]


def test_auto_minds_the_host() -> None:
    arguments = ("training.per_device_train_batch_size=auto", "training.activation_offload=true")
    free = ask_json(*arguments)["inputs"]["per_device_train_batch_size"]
    answer = ask_json(*arguments, "--host-memory", "96GiB")
    assert answer["inputs"]["per_device_train_batch_size"] < free
    assert answer["configured"]["fits"]


def test_a_gpu_without_bfloat16_is_judged_by_what_it_can_run() -> None:
    """It trains without a flash kernel, whatever model.use_flash_attention says, and is estimated so."""
    answer = ask_json("--gpu", "v100-32gb")
    assert (answer["configured"]["fits"], answer["configured"]["short_of"]) == (False, "does not run")
    best = answer["engines"]["deepspeed"]["recommendation"]["overrides"]
    assert (best["training.bf16"], best["training.fp16"]) == (False, True)
    half = ("--gpu", "v100-32gb", "training.bf16=false", "training.fp16=true")
    found = [ask_json(*half, f"model.use_flash_attention={flash}")["configured"] for flash in ("true", "false")]
    assert found[0] == found[1]
    assert found[0]["short_of"] != "does not run"


@pytest.mark.parametrize("command", ["ds_encdec.estimate_memory", "ds_encdec.cli validate --schema"])
def test_a_reader_may_leave(command: str) -> None:
    words = ["bash", "-c", f"set -o pipefail; {sys.executable} -m {command} | true"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


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
    """The command on the page prints what the page says."""
    page = (DOCS / "estimate-memory.md").read_text(encoding="utf-8")
    section = page.partition("## 7 B parameters on one GPU of 24 GB")[2].partition("\n## ")[0]
    command, printed = section.split("```")[1::2]
    arguments = shlex.split(command)[3:]
    assert set(printed.strip().splitlines()) <= set(ask(*arguments).splitlines())
    found = ask_json(*arguments)
    assert found["parameters"]["trainable"] > 7e9
    assert found["configured"]["fits"]
    assert found["inputs"]["gpu_usable_bytes"] < 24e9 * 1.1
    in_memory = ask_json(*arguments, "infra.offload_optimizer=cpu", "training.async_save=false")
    params = ask_json(*arguments, "infra.offload_params=cpu")
    assert f"{in_memory['configured']['host_bytes_per_node']['total'] / GIB:.1f} GiB instead" in section
    assert f"the GPU holds {params['configured']['bytes']['peak'] / GIB:.1f} GiB, and the host 16 more" in section


def test_the_picture_in_the_readme_shows_these_figures() -> None:
    """`python scripts/dev/pictures.py RUN` makes it."""
    drawn: dict[str, str] = defaultdict(str)
    for y, text in re.findall(r'<text [^>]*\by="([\d.]+)"[^>]*>([^<]*)</text>', (DOCS / "estimate.svg").read_text()):
        drawn[y] += f" {unescape(text)}"
    rows = [line for line in ask().splitlines() if re.match("[ *] zero", line)]
    assert len(rows) > 10
    assert {" ".join(row.split()) for row in rows} <= {" ".join(line.split()) for line in drawn.values()}
