"""Parts that measure: the machine, a step's speed and where its time goes, and memory."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import SHORT, Kit, make_engine, run_config, web_like_batches
from settings import SPEED_SETTINGS
from torch._dynamo.utils import counters

from ds_encdec.base.types import Batch
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.select import resolve_engine
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.process_group import init_process_group, shutdown
from ds_encdec.launch.world import discover
from ds_encdec.memory.estimate import estimate
from ds_encdec.memory.gpus import peak_flops
from ds_encdec.memory.job import make_job
from ds_encdec.model.parameter_count import count_parameters, training_flops

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "flash_attn")
SHIPPED_ACCUMULATION = 64  # those of ds_configs/qwen3_0.6b_ul2_1gpu.yaml, whose speed is computed
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
GIB = 2**30


def machine(kit: Kit) -> None:
    """Name the device and the packages, and measure what the estimate assumes, and the device's own speed."""
    versions = {name: _version(name) for name in PACKAGES}
    kit.row("versions", python=platform.python_version(), cores=os.cpu_count(), cuda=torch.version.cuda, **versions)
    if kit.device.type != "cuda":
        kit.omit("device", "there is no GPU: its context, NCCL's buffers and its peak speed are not measured")
        return
    torch.cuda.init()
    torch.ones(1, device=kit.device)
    properties = torch.cuda.get_device_properties(kit.device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(kit.device)))
    kit.row("device", device=properties.name, capability=capability, memory_gib=properties.total_memory / GIB)
    kit.row("rates", **_rates(kit))
    context = _beside_allocator()
    # The products have left cuBLAS' workspaces, which torch's allocator holds as long as the process lives.
    held = context + torch.cuda.memory_allocated()
    kit.row("context", context_gib=held / GIB, holds="driver, kernels and cuBLAS workspaces")
    init_process_group(discover(os.environ), kit.device, timedelta(minutes=1), "fsdp")
    buffer = torch.ones(50_000_000, device=kit.device)
    dist.all_reduce(buffer)
    nccl = _beside_allocator() - context
    kit.row("nccl", nccl_gib=nccl / GIB, ranks=1, note="with one rank a lower bound: channels to others have buffers")
    shutdown()


def _rates(kit: Kit) -> dict[str, float]:
    """Measure a large product in bf16 (of random data, since zeros would be faster) and a copy of 4 GiB."""
    left, source = torch.randn(8192, 8192, device=kit.device).bfloat16(), torch.randn(2**30, device=kit.device)
    right, target = torch.randn_like(left), torch.empty_like(source)
    product, copy = _seconds(kit, lambda: torch.mm(left, right)), _seconds(kit, lambda: target.copy_(source))
    return {"bf16_tflops": 2 * 8192**3 / product / 1e12, "copy_tb_per_s": 2 * source.nbytes / copy / 1e12}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _beside_allocator() -> int:
    """Bytes of the device that are taken, but not by torch's allocator; nobody else may be using it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _seconds(kit: Kit, action: Callable[[], Any], times: int = 10) -> float:
    """The median of what one call takes on the device, after three that warm it up."""
    taken = []
    for number in range(times + 3):
        kit.wait()
        begin = time.perf_counter()
        action()
        kit.wait()
        if number >= 3:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def speed_config(kit: Kit, setting: str) -> FullConfig:
    """The configuration of a row of `SPEED_SETTINGS`."""
    row = SPEED_SETTINGS[setting]
    training = {
        "per_device_train_batch_size": 1 if kit.dry_run else row.micro_batch,
        "gradient_accumulation_steps": 2 if kit.dry_run else 4,
        "activation_checkpointing": row.checkpointing,
        "torch_compile": row.compiled,
    }
    return run_config(kit, kit.sizes, training=training, infra=row.infra, data=SHORT if kit.dry_run else {})


def speed(kit: Kit, setting: str) -> None:
    """Tokens per second, MFU and memory of steps of the 1.02 B model, and a profile of one."""
    config = speed_config(kit, setting)
    accumulation = config.training.gradient_accumulation_steps
    batches, ratio = web_like_batches(config, kit.sizes["vocab_size"], 2 * accumulation)
    begin = time.perf_counter()
    engine, model = make_engine(kit, config, accumulation)
    kit.wait()
    built = time.perf_counter() - begin
    if kit.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    counters.clear()  # of what was compiled to try whether that works
    on_device = [batch.to(kit.device) for batch in batches]
    steps = cycle([on_device[:accumulation], on_device[accumulation:]])
    first = _run(kit, engine, [next(steps)])
    count = 1 if kit.dry_run else min(10, max(3, round(6 / _run(kit, engine, [next(steps)]))))
    measured = [next(steps) for _ in range(count)]
    seconds = _run(kit, engine, measured) / count
    tokens = sum(one.encoder_tokens + one.target_tokens for step in measured for one in step) / count
    flops = sum(training_flops(model, one.encoder_lengths, one.decoder_lengths) for step in measured for one in step)
    micro_batch, update = _timed_step(kit, engine, next(steps))
    shipped = SHIPPED_ACCUMULATION * tokens / accumulation / (SHIPPED_ACCUMULATION * micro_batch + update)
    peak = peak_flops(torch.cuda.get_device_name()) if kit.device.type == "cuda" else None
    place: dict[str, Any] = {"world_size": 1, "ranks_per_node": 1, "device": kit.device.type}
    job = make_job(
        config, model, resolve_engine(config), **place, gradient_accumulation_steps=accumulation, ratio=ratio
    )
    expected = estimate(job)
    kit.row(
        setting,
        tokens_per_second=tokens / seconds,
        mfu=peak and flops / count / seconds / peak,
        step_ms=1e3 * seconds,
        steps=count,
        micro_batch_ms=1e3 * micro_batch,
        update_ms=1e3 * update,
        tokens_per_second_at_64=shipped,
        first_step_s=first,
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        built_s=built,
        parameters=count_parameters(model),
        documents=statistics.mean(len(batch.documents) for batch in batches),
        tokens_a_micro_batch=tokens / accumulation,
        **_memory(kit, expected.peak.total - expected.peak.framework),
    )
    _profile(kit, engine, next(steps)[:1], setting)


def _run(kit: Kit, engine: Engine, steps: Sequence[Sequence[Batch]]) -> float:
    """Seconds that `steps` take; the host may run ahead from step to step."""
    kit.wait()
    begin = time.perf_counter()
    for batches in steps:
        _step(engine, batches)
    kit.wait()
    return time.perf_counter() - begin


def _step(engine: Engine, batches: Sequence[Batch]) -> None:
    target_tokens = sum(batch.target_tokens for batch in batches)
    for number, batch in enumerate(batches, start=1):
        loss = next(engine.losses([batch]))
        engine.backward(loss, num_losses=target_tokens, last=number == len(batches))
    engine.step()


def _timed_step(kit: Kit, engine: Engine, batches: Sequence[Batch]) -> tuple[float, float]:
    """Seconds of a micro-batch and of the optimizer's step, waiting for the device after each."""
    target_tokens, times = sum(batch.target_tokens for batch in batches), []
    for number, batch in enumerate(batches, start=1):
        kit.wait()
        begin = time.perf_counter()
        engine.backward(next(engine.losses([batch])), num_losses=target_tokens, last=number == len(batches))
        kit.wait()
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    engine.step()
    kit.wait()
    # The last one also reduces gradients: that is the step's, as its beginning is.
    micro_batch = statistics.median(times[:-1])
    return micro_batch, time.perf_counter() - begin + max(0.0, times[-1] - micro_batch)


def _memory(kit: Kit, estimated: float) -> dict[str, float | None]:
    """The peak of the steps so far beside the estimate of it, without what is beside tensors; nothing on a CPU."""
    if kit.device.type != "cuda":
        return {"estimated_gib": estimated / GIB}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    return {
        "estimated_gib": estimated / GIB,
        "allocated_gib": allocated / GIB,
        "reserved_gib": reserved / GIB,
        "estimated_over_allocated": estimated / allocated,
        "fragmentation": reserved / allocated - 1,
        "beside_allocator_gib": (total - free - torch.cuda.memory_reserved()) / GIB,
    }


def _profile(kit: Kit, engine: Engine, batches: Sequence[Batch], setting: str) -> None:
    """The kernels of a step of one micro-batch, how busy they keep the device, and where the host waits for it."""
    on_gpu, kinds = kit.device.type == "cuda", torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *[kinds.CUDA] * on_gpu]
    kit.wait()
    with torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        _step(engine, batches)
        host = time.perf_counter() - begin
        kit.wait()
        seconds = time.perf_counter() - begin
    averages = profile.key_averages()
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    mine = [event for event in averages if event.device_type == device and not (on_gpu and event.is_user_annotation)]
    taken = {event.key: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) for event in mine}
    counts = {event.key: event.count for event in averages}
    kit.row(
        f"profile of {setting}",
        step_ms=1e3 * seconds,
        host_ms=1e3 * host,
        kernels=sum(event.count for event in mine),
        busy=sum(taken.values()) / 1e6 / seconds,
        waits=sum(counts.get(name, 0) for name in WAITS),
        host_waits={name: counts[name] for name in WAITS if name in counts},
        top=[
            {"kernel": name[:160], "ms": taken[name] / 1e3, "count": counts[name]}
            for name in sorted(taken, key=lambda name: -taken[name])[:25]
        ],
    )


# Engine, stage, offload of the optimizer, offload of parameters.
_MEMORY_SHARDINGS = (
    ("deepspeed", "zero1", "none", "none"),
    ("deepspeed", "zero2", "none", "none"),
    ("deepspeed", "zero3", "none", "none"),
    ("deepspeed", "zero3", "cpu", "none"),
    ("fsdp", "zero2", "none", "none"),
    ("fsdp", "zero3", "none", "none"),
)
_WIDE = {"vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 3072}


def memory(kit: Kit) -> None:
    """The estimate against the allocator for twelve settings: engines, recomputation, and two sizes of model."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
    import memory as bench  # the benchmark of the estimate; measures by the allocator on a GPU

    bench.MODELS["wide"] = _WIDE
    world = discover(os.environ)
    init_process_group(world, kit.device, timedelta(minutes=2), "deepspeed")
    collectives = HostCollectives()
    if kit.device.type == "cuda":
        # cuBLAS' workspaces, 32 MiB a thread on Hopper, stay with torch's allocator. They are no row's.
        some = torch.ones(64, 64, device=kit.device, dtype=torch.bfloat16, requires_grad=True)
        (some @ some).sum().backward()
        del some
    models, shardings = ("large", "wide"), _MEMORY_SHARDINGS
    if kit.dry_run:
        kit.omit("other settings", "scripts/bench/memory.py has them on a CPU")
        models, shardings = ("small",), _MEMORY_SHARDINGS[-2:-1]
    for number, sharding in enumerate(shardings):
        for checkpointing, model in zip(("none", "full"), models[:: 1 - 2 * (number % 2)], strict=not kit.dry_run):
            row = bench.Row(*sharding, "bf16", checkpointing, model, 1 if kit.dry_run else 8, 2)
            found = bench.measure(row, RunContext(world, kit.device, row.engine, collectives))
            sizes = {f"{name}_mib": found[name] / 2**20 for name in ("estimated", "measured")}
            facts = {name: found[name] for name in ("ratio", "moment", "phases", "peak")}
            kit.row(found["row"], ok=found["within"], **sizes, **facts)
    shutdown()
