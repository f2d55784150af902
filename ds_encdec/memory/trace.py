"""A training step of this model and engine, run without its memory: what it would hold, by category, and when.

The FSDP2 engine's own code builds its shards, runs forward, backward and step under torch's FakeTensorMode, where
tensors have shapes and no data, in a process group that is a fake of any size. Every storage is followed from operator
to operator (storage_log.py). So a machine without a GPU can tell within a minute what a rank of a cluster would hold,
down to each temporary, and the arithmetic of the estimate is checked against it.

What runs is what a GPU would run (gpu_fakes.py). What operators allocate inside and give back before they return is
not seen, except in flash attention's backward pass.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine import fsdp2
from ds_encdec.engine.sharded_engine import compute_dtype, packed_forward
from ds_encdec.engines import ENGINES, load
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.breakdown import Breakdown
from ds_encdec.memory.gpu_fakes import as_on_device, substituted, varlen_kernel
from ds_encdec.memory.job import Job
from ds_encdec.memory.storage_log import StorageLog, storages_of
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.types import Batch

Category = Literal[
    "weights", "master_weights", "gradients", "optimizer", "activations", "logits", "communication", "host"
]
"""The categories of `Breakdown`; `host`: what an offloading engine keeps there, which is left out of every sum."""

_ACTIVATIONS: tuple[Category, ...] = ("activations", "logits")
_ENGINE: tuple[Category, ...] = ("weights", "master_weights", "gradients", "optimizer", *_ACTIVATIONS, "communication")
"""The categories that a trace finds without the engine, and with it."""

_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TracedMemory:
    """The bytes that one rank's device held at its worst moment of a traced step.

    `categories`: those of `peak` that were traced; the others are 0 in it. `moment`: the part of the step, and the
    layer in work. `seconds`: what the trace took. `remark`: what the trace leaves out of this job, in whole sentences;
    empty for nothing.
    """

    peak: Breakdown
    categories: tuple[str, ...]
    moment: str
    seconds: float
    remark: str


def trace_memory(job: Job) -> TracedMemory:
    """Trace a step of `job` on rank 0, which holds most where rows do not divide evenly.

    Only in a process without a process group.

    For DeepSpeed, whose engine cannot run without memory, only the activations and logits of one micro-batch.
    """
    start, traced = time.monotonic(), ENGINES[job.engine].trace
    log: StorageLog[Category] = watched_pass(job) if traced is None else load(traced)(job)
    held, moment = log.peak(counted=_ACTIVATIONS if traced is None else _ENGINE)
    return TracedMemory(Breakdown(**held), tuple(held), moment, time.monotonic() - start, " ".join(_remarks(job)))


def _remarks(job: Job) -> Iterator[str]:
    training = job.config.training
    if ENGINES[job.engine].trace is None:
        yield f"{ENGINES[job.engine].title}'s engine cannot be traced: these are activations and logits alone."
    elif job.config.infra.offload_optimizer == "cpu":
        yield "What is copied between host and device for the offload is left out."
    if job.trainable_parameters < job.parameters:
        yield "Frozen parts are traced as if they were trained."
    if training.activation_offload:
        yield "Activations are traced as if they stayed on the device (training.activation_offload=false)."
    if training.torch_compile:
        yield "Layers are traced as they are without torch.compile."
    if job.device == "cuda" and varlen_kernel(torch.empty(0, dtype=compute_dtype(training))) is None:
        yield "Attention is traced document by document: this torch has no variable-length kernel for it."


def fsdp_step(job: Job) -> StorageLog[Category]:
    """The log of a step of the FSDP2 engine, but for the optimizer's part.

    That works in place: beside its states it holds no more than the gradients.
    """
    config, local_ranks = _traceable_config(job), min(job.ranks_per_node, job.world_size)
    num_nodes = -(-job.world_size // local_ranks)
    world = World(0, 0, job.world_size, local_ranks, 0, num_nodes, "localhost", 0, "trace")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.world_size)
    try:
        # Made of real tensors, whose values it reads.
        mesh = fsdp2.make_mesh(config.infra, world, _DEVICE)
        with ExitStack() as traced:
            traced.enter_context(FakeTensorMode())
            traced.enter_context(as_on_device(job))
            traced.enter_context(substituted(fsdp2, "make_mesh", lambda *_: mesh))
            traced.enter_context(substituted(dist, "new_group", lambda *_, **__: dist.group.WORLD))
            context = RunContext(world, _DEVICE, job.engine, HostCollectives())
            engine = fsdp2.FSDP2Engine(config, context, _model_config(job), None)
            return _traced_step(engine, _batch(job), job)
    finally:
        gc.collect()  # engines are cyclic, and hold on to the group
        dist.destroy_process_group()


def _traced_step(engine: fsdp2.FSDP2Engine, batch: Batch, job: Job) -> StorageLog[Category]:
    watch = _StorageWatch()
    _note_fsdp_states(engine, watch, on_host=job.config.infra.offload_optimizer == "cpu")
    _follow_modules(engine.model, watch)
    micro_batches = min(job.gradient_accumulation_steps, 2)  # a third adds to what the second found
    with watch.log.watched_resizes(), watch:
        for index in range(micro_batches):
            watch.now_in(part="forward pass")
            loss_sum = engine.forward(batch)
            watch.now_in(part="backward pass")
            engine.backward(loss_sum, target_tokens=batch.target_tokens, last=index == micro_batches - 1)
    return watch.log


def watched_pass(job: Job, *, backward: bool = True) -> StorageLog[Category]:
    """The log of one micro-batch's pass through a model that is not sharded: forward, and `backward` unless False."""
    training = _traceable_config(job).training
    with ExitStack() as traced:
        traced.enter_context(FakeTensorMode())
        traced.enter_context(as_on_device(job))
        traced.enter_context(no_init_weights())
        traced.enter_context(torch.set_grad_enabled(backward))
        model = Qwen3ForSeq2SeqLM._from_config(_model_config(job), dtype=compute_dtype(training))
        apply_activation_checkpointing(
            model, training.activation_checkpointing, every_n=training.activation_checkpointing_every_n
        )
        watch = _StorageWatch()
        watch.claim(model.parameters(), "weights")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda weight: watch.claim([weight.grad], "gradients"))
        _follow_modules(model, watch)
        batch = _batch(job)
        watch.claim([getattr(batch, field.name) for field in dataclasses.fields(batch)], "activations")
        with watch.log.watched_resizes(), watch:
            watch.now_in(part="forward pass")
            loss_sum = packed_forward(model.train(backward), batch)
            if backward:
                watch.now_in(part="backward pass")
                loss_sum.total.backward()
    return watch.log


def _traceable_config(job: Job) -> FullConfig:
    """Without what needs real memory: addresses, and kernels to be compiled."""
    training = job.config.training.model_copy(update={"activation_offload": False, "torch_compile": False})
    return job.config.model_copy(update={"training": training})


def _model_config(job: Job) -> Qwen3Seq2SeqConfig:
    return Qwen3Seq2SeqConfig(
        **dataclasses.asdict(job.sizes),
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        loss_chunk_tokens=job.config.model.loss_chunk_tokens,
        use_flash_attention=job.config.model.use_flash_attention,
    )


def _batch(job: Job) -> Batch:
    """A full micro-batch of the fewest, and so the longest, documents. Of fake tensors; nobody looks at its ids."""
    data = job.config.data
    documents = max(
        -(-job.encoder_tokens // data.max_encoder_length), -(-job.decoder_tokens // data.max_decoder_length)
    )
    boundaries = torch.zeros(data.max_examples_per_micro_batch + 1, dtype=torch.int32)
    encoder_ids, decoder_ids = (
        torch.zeros(count, dtype=torch.int64) for count in (job.encoder_tokens, job.decoder_tokens)
    )
    return Batch(
        encoder_ids=encoder_ids,
        decoder_input_ids=decoder_ids,
        labels=torch.zeros_like(decoder_ids),
        encoder_positions=torch.zeros_like(encoder_ids),
        decoder_positions=torch.zeros_like(decoder_ids),
        encoder_cu_seqlens=boundaries,
        decoder_cu_seqlens=boundaries.clone(),
        denoiser_ids=torch.zeros_like(decoder_ids),
        encoder_lengths=_even_lengths(job.encoder_tokens, documents),
        decoder_lengths=_even_lengths(job.decoder_tokens, documents),
    )


def _even_lengths(tokens: int, documents: int) -> tuple[int, ...]:
    return tuple(tokens * (index + 1) // documents - tokens * index // documents for index in range(documents))


class _StorageWatch(TorchDispatchMode):
    """Logs the storages that operators make, with the part of the step and the layer that are in work."""

    def __init__(self) -> None:
        super().__init__()
        self.log: StorageLog[Category] = StorageLog(get_args(Category))
        self.category: Category = "activations"
        """The category of storages made from now on."""
        self._part = self._module = ""

    def __enter__(self) -> _StorageWatch:
        self._fake_mode = active_fake_mode()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the local tensors
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:  # else DTensor tries out which shapes would result
            self.log.note(storages_of(tree_leaves(result)), self.category)
            if func.namespace == torch.ops.fsdp.name:
                self._claim_buffers(tree_leaves((args, kwargs, result)))
        return result

    def now_in(self, *, part: str | None = None, module: str | None = None) -> None:
        """Set what is in work from now on; None for what stays."""
        self._part = self._part if part is None else part
        self._module = self._module if module is None else module
        self.log.moment = ", ".join(filter(None, (self._part, self._module)))

    def claim(self, tensors: Iterable[object], category: Category) -> None:
        """`tensors` (what else is among them is passed over) are there, for `category`."""
        self.log.claim(storages_of(tensors), category)

    def _claim_buffers(self, leaves: Iterable[object]) -> None:
        """FSDP2's own operators fill and empty the buffers that are sent."""
        for storage in storages_of(leaves):
            if self.log.purpose_of(storage) == "activations":
                self.log.claim([storage], "communication")


def _follow_modules(model: nn.Module, watch: _StorageWatch) -> None:
    """Tell `watch` which layer is in work, and what the head makes."""
    for name, module in model.named_modules():
        if name in ("lm_head", "shared") or name.rpartition(".")[0] in ("encoder.layers", "decoder.layers"):
            _follow_module(name, module, watch)


def _follow_module(name: str, module: nn.Module, watch: _StorageWatch) -> None:
    inside: Category = "logits" if name == "lm_head" else "activations"

    def enter(*_: Any) -> None:
        watch.now_in(module=name)
        watch.category = inside

    def leave(_module: nn.Module, _arguments: Any, output: Any) -> None:
        watch.category = "activations"
        for tensor in tree_leaves(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: enter_backward())

    def enter_backward() -> None:
        watch.now_in(module=name)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _note_fsdp_states(engine: fsdp2.FSDP2Engine, watch: _StorageWatch, *, on_host: bool) -> None:
    """Tell `watch` what is there between two steps, and let it know what FSDP2 gathers and reduces during one."""
    watch.claim(tree_leaves(list(engine.optimizer.state.values())), "host" if on_host else "optimizer")
    for module in engine.model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            watch.claim(
                [parameter.sharded_param for parameter in group.fsdp_params], "host" if on_host else "master_weights"
            )
            group.post_backward = _noting_gradients(group, watch, on_host)


def _noting_gradients(group: Any, watch: _StorageWatch, on_host: bool) -> Callable[..., None]:
    """`group.post_backward`, which also says what each storage of the group is for: by then all of them exist."""
    original, parameters = group.post_backward, group.fsdp_params

    def post_backward(*arguments: Any) -> None:
        for parameter in parameters:
            # The first forward pass pads the shards anew.
            watch.claim([parameter.sharded_param], "host" if on_host else "master_weights")
            watch.claim(parameter.all_gather_outputs, "communication" if group._reshard_after_forward else "weights")
            watch.claim([parameter._unsharded_param.grad], "gradients")
        original(*arguments)
        for parameter in parameters:
            watch.claim([parameter.unsharded_accumulated_grad], "gradients")
            watch.claim([parameter.sharded_param.grad], "host" if on_host else "gradients")

    return post_backward
