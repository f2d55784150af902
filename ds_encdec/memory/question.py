"""Reads the options of `estimate_memory` into a job, a GPU and a host. GPUs are spread evenly over the nodes."""

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ds_encdec.base.quantities import GIB, in_gib
from ds_encdec.base.types import ConfigError
from ds_encdec.config import shares
from ds_encdec.config.rules import engine_candidates
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.memory import variants
from ds_encdec.memory.breakdown import Estimate
from ds_encdec.memory.estimate import engine_memory, estimate
from ds_encdec.memory.gpus import DEFAULT_GPU, GPUS, Gpu, has_gpu, parse_bytes, parse_gpu
from ds_encdec.memory.job import Job, Sizes, make_job, run_sizes
from ds_encdec.memory.zero import swapped_bytes

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The run, its GPUs, the bytes of a node if known, and remarks. On CPUs only hosts count, whatever `gpu` is."""

    job: Job
    gpu: Gpu
    host_bytes: int | None
    remarks: Sequence[str] = ()

    def runs(self, job: Job) -> bool:
        """Return whether the GPU computes in the dtypes of `job`."""
        return self.gpu.has_bf16 or not job.config.training.bf16

    def short_of(self, row: variants.Variant) -> str | None:
        """Return "GPU" or "host" where less than the headroom stays free, else None; an unknown host suffices."""
        if row.job.device == "cuda" and row.estimate.peak.total > self.gpu.usable_bytes * (1 - variants.HEADROOM):
            return "GPU"
        return "host" if self.host_bytes and row.node_bytes > self.host_bytes * (1 - variants.HOST_HEADROOM) else None

    def fits(self, row: variants.Variant) -> bool:
        """Return whether the row fits on the GPU, and on its host if that is known."""
        return self.short_of(row) is None


def read_request(options: argparse.Namespace, overrides: Sequence[str]) -> EstimateRequest:
    """Read the options; overrides prevail over options that stand for fields. ConfigError lists every problem."""
    problems: list[str] = []
    gpu = _attempt(problems, parse_gpu, DEFAULT_GPU if options.gpu is None else options.gpu)
    host_bytes = parse_bytes(options.host_memory or "")
    if options.host_memory is not None and (host_bytes or 0) < GIB:
        problems.append(f"--host-memory {options.host_memory}: not a size of a machine; write 512GiB, 1TB or bytes")
    wrong = [
        f"{name} {count}: must be at least 1"
        for name, count in (("--gpus", options.gpus), ("--nodes", options.nodes))
        if count is not None and count < 1
    ]
    problems += wrong
    # This command's options as overrides, which belong to the recommendation.
    model = f"model.model_name_or_path={json.dumps(options.model)}"
    own = [] if options.model is None else [model, "model.architecture=null"]
    gpus = [f"infra.num_gpus={options.gpus}"] if (options.gpus or 0) > 0 else []
    config = _attempt(problems, load_config, options.config, [*own, *gpus, *overrides], options.deepspeed_config)
    if config is not None:
        if options.gpu and config.infra.device == "cpu":
            problems.append(f"--gpu {options.gpu} and infra.device=cpu contradict each other: give only one")
        sizes = _attempt(problems, run_sizes, config)
        problems += [] if wrong else indivisible(config, options.nodes)
    if problems or config is None or gpu is None or sizes is None:
        raise ConfigError("\n".join(problems))
    if not gpu.has_bf16:
        # Flash kernels need as much as bfloat16 does: attention then runs without (model/attention_kernels.py).
        config = variants.with_fields(config, {"model.use_flash_attention": False})
    sizes_to_try = shares.micro_batch_candidates(config, config.infra.num_gpus) if shares.is_auto(config) else []
    config, choice = planned_checkpointing(config, sizes, options.nodes, gpu)
    sized = [shares.with_micro_batch_size(config, size, config.infra.num_gpus) for size in sizes_to_try]
    for tried in sized or [config]:
        request = EstimateRequest(planned_job(tried, sizes, options.nodes, gpu), gpu, host_bytes)
        if request.fits(variants.variant(request.job, {})):  # the largest that fits, or the last, 1
            break
    return replace(request, remarks=[*([f"{choice}."] if choice else []), *_remarks(options, own, config, request)])


def _attempt(problems: list[str], read: Callable[..., Found], *arguments: Any) -> Found | None:
    try:
        return read(*arguments)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _remarks(options: argparse.Namespace, own: list[str], config: FullConfig, request: EstimateRequest) -> list[str]:
    training = request.job.config.training
    rows = (
        (
            shares.is_auto(config),
            "training.per_device_train_batch_size=auto: taken to be the largest that fits by this estimate, "
            f"{training.micro_batch_size}. A run tries real steps.",
        ),
        (
            not request.runs(request.job),
            f"A {request.gpu.name} has neither bfloat16 nor a flash kernel: the tables are for training.bf16=false "
            "training.fp16=true.",
        ),
        (
            training.torch_compile is True,
            "torch_compile: estimated like layers that are not compiled, whose activations may differ.",
        ),
        (
            config.infra.device == "auto" and not options.gpu and not has_gpu(),
            "This is for GPUs; a run on the CPUs of a machine without them is estimated with infra.device=cpu.",
        ),
        (
            swapped := swapped_bytes(request.job),
            f"The disk of infra.nvme_path holds {in_gib(swapped)} GiB on each host: optimizer states and gradients.",
        ),
        (own, f"Recommended overrides also need those of this command's options: {shlex.join(own)}"),
        (
            options.deepspeed_config,
            f"Settings of {options.deepspeed_config} must be changed in that file, too: a run refuses a disagreement.",
        ),
    )
    return [remark for applies, remark in rows if applies]


def indivisible(config: FullConfig, nodes: int) -> list[str]:
    """Return problems with numbers that do not divide evenly, which a run would report on starting."""
    gpus, problems = config.infra.num_gpus, list[str]()
    if gpus % nodes:
        return [f"--gpus {gpus} --nodes {nodes}: every node must have as many GPUs; give a multiple of {nodes}"]
    _attempt(problems, shares.micro_batch_candidates if shares.is_auto(config) else shares.plan_lanes, config, gpus)
    _attempt(problems, shares.mesh_shape, config.infra, gpus, gpus // nodes)
    return problems


def estimate_run(config: FullConfig, *, nodes: int = 1) -> Estimate:
    """Estimate the worst moment of the run of `config` on each of `infra.num_gpus` GPUs (or CPU ranks) in `nodes`. A
    micro-batch size of `auto` counts as its first try. Raises ConfigError."""
    config = shares.with_assumed_batch_size(config, config.infra.num_gpus)
    return estimate(planned_job(config, run_sizes(config), nodes))


def planned_checkpointing(config: FullConfig, sizes: Sizes, nodes: int, gpu: Gpu) -> tuple[FullConfig, str]:
    """Return `config` with a mode for `training.activation_checkpointing: auto`, and the choice in words ("": none)."""
    if config.training.activation_checkpointing != "auto":
        return config, ""
    first = shares.with_first_batch_size(config, config.infra.num_gpus)  # a micro-batch size of `auto` follows the mode
    mode, choice = variants.choose_recompute(_planned(first, sizes, nodes), gpu.usable_bytes)
    return variants.with_fields(config, {variants.RECOMPUTATION: mode}), choice


def planned_job(config: FullConfig, sizes: Sizes, nodes: int, gpu: Gpu = GPUS[DEFAULT_GPU]) -> Job:
    """Return the run of `config`, whose micro-batch size is a number. Raises ConfigError if a run would refuse it."""
    job = _planned(planned_checkpointing(config, sizes, nodes, gpu)[0], sizes, nodes)
    engine_memory(job)
    return job


def _planned(config: FullConfig, sizes: Sizes, nodes: int) -> Job:
    gpus, engine = config.infra.num_gpus, engine_candidates(config)[0].name
    device: Literal["cuda", "cpu"] = "cpu" if config.infra.device == "cpu" else "cuda"
    return make_job(config, sizes, engine, world_size=gpus, ranks_per_node=gpus // nodes, device=device)
