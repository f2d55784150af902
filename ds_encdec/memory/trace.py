"""A traced training step: the bytes that this model and engine would hold, by category, without the memory for it.

The FSDP2 engine's own code runs forward, backward and step under torch's FakeTensorMode, where tensors have shapes and
no data, in a fake process group of any size. storage_log.py follows every storage. So a machine without a GPU finds
within a minute the memory of a cluster's rank, down to each temporary, and checks the estimate's arithmetic.

Fake tensors are on the CPU, because torch has no fake GPU without CUDA. The model sees the job's device; stand-ins for
a GPU's kernels compute nothing, but allocate, keep and free as they do. Memory inside operators is not seen, except in
flash attention's backward pass.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from ds_encdec.base.foreign_places import replaced
from ds_encdec.base.types import Batch
from ds_encdec.config.training_sections import CROSS_ENTROPY
from ds_encdec.engine import fsdp2
from ds_encdec.engine.sharded_engine import compute_dtype, draws_masks, packed_forward, regularize
from ds_encdec.engine.user_code import load_loss, try_optimizer
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.launch.world import World
from ds_encdec.memory.breakdown import Breakdown, TracedMemory
from ds_encdec.memory.job import Job
from ds_encdec.memory.storage_log import StorageLog, storages_of
from ds_encdec.memory.variants import changed, with_fields
from ds_encdec.model import attention_kernels, loss, loss_kernel, modeling, precision
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import choose_trained
from ds_encdec.registry.engines import ENGINES, ByEngine
from ds_encdec.registry.optimizers import OPTIMIZERS

_ACTIVATIONS = ("activations", "logits")
# Categories of a trace without the engine, and with it. No sum has `host`, an offloading engine's host memory.
_ENGINE = ("weights", "master_weights", "gradients", "optimizer", *_ACTIVATIONS, "communication")

_DEVICE = torch.device("cpu")


def trace_memory(job: Job) -> TracedMemory:
    """Trace a step of `job` on rank 0, which has the most. Do not call it in a process with a process group.

    DeepSpeed's engine cannot run without memory: only activations and logits of one micro-batch are traced.
    """
    start, traced, title = time.monotonic(), _STEPS[job.engine], ENGINES[job.engine].title
    training, lora = job.config.training, job.config.model.lora
    remarks = {
        f"{title}'s engine cannot be traced: these are activations and logits alone.": traced is None,
        "What is copied between host and device for the offload is left out.": (
            traced is not None and job.config.infra.offload_optimizer == "cpu"
        ),
        "Activations are traced as if they stayed on the device (training.activation_offload=false).": (
            training.activation_offload
        ),
        "Layers are traced as they are without torch.compile.": training.torch_compile is True,
        "Matrices in 4 bits are traced in the compute dtype.": lora is not None and lora.quantize != "none",
        "Attention is traced document by document: this torch has no variable-length kernel for it.": (
            job.device == "cuda" and job.compute_bytes != 2
        ),
    }
    # The user's optimizer and loss are tried here: a trial needs numbers, which the tensors below do not have.
    if training.optimizer not in OPTIMIZERS:
        try_optimizer(training.optimizer, training.optimizer_args)
    if training.loss != CROSS_ENTROPY:
        load_loss(training.loss)
    if lora is not None:
        job = changed(job, {"model.lora": lora.model_copy(update={"quantize": "none"})})
    held, moment = traced(job).peak(_ENGINE) if traced else watched_pass(job).peak(_ACTIVATIONS)
    remark = " ".join(remark for remark, applies in remarks.items() if applies)
    return TracedMemory(Breakdown(**held), tuple(held), moment, time.monotonic() - start, remark)


def fsdp_step(job: Job) -> StorageLog:
    """Log a step of FSDP2 without the optimizer's part, which works in place."""
    # Without features that need real memory: addresses, and kernels to be compiled.
    config = with_fields(job.config, {"training.activation_offload": False, "training.torch_compile": False})
    local_ranks = min(job.ranks_per_node, job.world_size)
    world = World(0, 0, job.world_size, local_ranks, 0, -(-job.world_size // local_ranks), "localhost", 0, "trace")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.world_size)
    try:
        mesh = fsdp2.make_mesh(config.infra, world, _DEVICE)  # made of real tensors, whose values it reads
        with (
            FakeTensorMode(),
            as_on_device(job),
            patch.object(fsdp2, "make_mesh", lambda *_: mesh),
            patch.object(dist, "new_group", lambda *_, **__: dist.group.WORLD),
        ):
            context, batch = RunContext(world, _DEVICE, job.engine, HostCollectives()), _batch(job)
            engine = fsdp2.FSDP2Engine(config, context, _model_config(job), None)
            watch = _StorageWatch(engine.model)
            _note_fsdp_states(engine, watch, context.undo, on_host=config.infra.offload_optimizer == "cpu")
            last = min(job.gradient_accumulation_steps, 2)  # a third micro-batch repeats the second
            with watch.log.watched_resizes(), watch, context.undo:
                for number in range(1, last + 1):
                    watch.now_in(part="forward pass")
                    loss_sum = engine.forward(batch)
                    watch.now_in(part="backward pass")
                    engine.backward(loss_sum, target_tokens=batch.target_tokens, last=number == last)
            return watch.log
    finally:
        gc.collect()  # engines have reference cycles, which keep the group
        dist.destroy_process_group()


# Traces a step of the engine itself; None if only its activations can be traced.
_STEPS: ByEngine[Callable[[Job], StorageLog] | None] = ByEngine(deepspeed=None, fsdp=fsdp_step)


def watched_pass(job: Job, *, backward: bool = True) -> StorageLog:
    """Log one micro-batch's pass through an unsharded model: forward, and `backward` unless False."""
    training = job.config.training
    with FakeTensorMode(), as_on_device(job), no_init_weights(), torch.set_grad_enabled(backward):
        before, dtype = torch.get_default_dtype(), compute_dtype(training)
        model = modeling.Qwen3ForSeq2SeqLM._from_config(_model_config(job), dtype=dtype)
        torch.set_default_dtype(dtype)
        try:
            choose_trained(model, job.config)
        finally:
            torch.set_default_dtype(before)
        apply_activation_checkpointing(
            model,
            training.recomputation,
            every_n=training.activation_checkpointing_every_n,
            random=draws_masks(job.config),
        )
        regularize(model, training)
        watch, batch = _StorageWatch(model), _batch(job)
        watch.claim(model.parameters(), "weights")
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda weight: watch.claim([weight.grad], "gradients"))
        watch.claim([getattr(batch, field.name) for field in fields(batch)], "activations")
        with watch.log.watched_resizes(), watch:
            watch.now_in(part="forward pass")
            loss_sum = packed_forward(model.train(backward), batch)
            if backward:
                watch.now_in(part="backward pass")
                loss_sum.total.backward()
    return watch.log


def _model_config(job: Job) -> Qwen3Seq2SeqConfig:
    return Qwen3Seq2SeqConfig(
        **asdict(job.sizes),
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        loss_chunk_tokens=job.config.model.loss_chunk_tokens,
        use_flash_attention=job.config.model.use_flash_attention,
    )


def _batch(job: Job) -> Batch:
    """Return a full micro-batch of fake tensors with the fewest, so the longest, documents; nothing reads its ids."""
    data = job.config.data
    documents = max(
        -(-job.encoder_tokens // data.max_encoder_length), -(-job.decoder_tokens // data.max_decoder_length)
    )

    def even_lengths(tokens: int) -> tuple[int, ...]:
        return tuple(tokens * (index + 1) // documents - tokens * index // documents for index in range(documents))

    boundaries = torch.zeros(data.max_examples_per_micro_batch + 1, dtype=torch.int32)
    encoder_ids, decoder_ids = (torch.zeros(n, dtype=torch.int64) for n in (job.encoder_tokens, job.decoder_tokens))
    return Batch(
        encoder_ids=encoder_ids,
        decoder_input_ids=decoder_ids,
        labels=torch.zeros_like(decoder_ids),
        encoder_positions=torch.zeros_like(encoder_ids),
        decoder_positions=torch.zeros_like(decoder_ids),
        encoder_cu_seqlens=boundaries,
        decoder_cu_seqlens=boundaries.clone(),
        denoiser_ids=torch.zeros_like(decoder_ids),
        encoder_lengths=even_lengths(job.encoder_tokens),
        decoder_lengths=even_lengths(job.decoder_tokens),
    )


class _StorageWatch(TorchDispatchMode):
    """Logs storages that operators make, with the running part of the step and layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.log: StorageLog = StorageLog()
        self._fake_mode = active_fake_mode()
        self._category: str = "activations"  # of storages made from now on
        self._part = self._module = ""

        def enter(name: str, *_: Any) -> None:
            self.now_in(module=name)
            self._category = "logits" if name == "lm_head" else "activations"

        def leave(name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
            self._category = "activations"
            for tensor in tree_leaves(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.now_in(module=name))

        for name, module in model.named_modules():
            if name in ("lm_head", "shared") or name.rpartition(".")[0] in ("encoder.layers", "decoder.layers"):
                module.register_forward_pre_hook(partial(enter, name))
                module.register_forward_hook(partial(leave, name))

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # torch calls again with the local tensors
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:  # else DTensor tries out which shapes would result
            self.log.note(storages_of(tree_leaves(result)), self._category)
            if func.namespace == torch.ops.fsdp.name:  # FSDP2's own operators fill and empty the buffers that are sent
                buffers = storages_of(tree_leaves((args, kwargs, result)))
                self.log.claim(buffers, "communication", instead_of="activations")
        return result

    def now_in(self, *, part: str = "", module: str = "") -> None:
        """Set the part and the module that run from now on; "" keeps one."""
        self._part, self._module = part or self._part, module or self._module
        self.log.moment = ", ".join(filter(None, (self._part, self._module)))

    def claim(self, tensors: Iterable[object], category: str) -> None:
        self.log.claim(storages_of(tensors), category)


def _note_fsdp_states(engine: fsdp2.FSDP2Engine, watch: _StorageWatch, undo: ExitStack, *, on_host: bool) -> None:
    """Claim the tensors between two steps and, until `undo`, those that FSDP2 gathers and reduces during one."""
    watch.claim(tree_leaves(list(engine.optimizer.state.values())), "host" if on_host else "optimizer")

    def claim_shards(group: Any) -> None:
        watch.claim([each.sharded_param for each in group.fsdp_params], "host" if on_host else "master_weights")

    def post_backward(group: Any, original: Callable[..., None], *arguments: Any) -> None:
        claim_shards(group)  # the first forward pass pads the shards again
        for parameter in group.fsdp_params:  # by now all of its storages exist
            watch.claim(parameter.all_gather_outputs, "communication" if group._reshard_after_forward else "weights")
            watch.claim([parameter._unsharded_param.grad], "gradients")
        original(*arguments)
        for parameter in group.fsdp_params:
            watch.claim([parameter.unsharded_accumulated_grad], "gradients")
            watch.claim([parameter.sharded_param.grad], "host" if on_host else "gradients")

    for module in engine.model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            claim_shards(group)
            undo.enter_context(replaced(group, "post_backward", partial(post_backward, group, group.post_backward)))


@contextmanager
def as_on_device(job: Job) -> Iterator[None]:
    """Inside, run on the CPU the code that the model would run on the device of `job`."""
    emulated = frozenset({compute_dtype(job.config.training)}) if job.emulates_bf16 else frozenset()
    substitutes: list[tuple[Any, str, object]] = [(precision, "_EMULATED_ON_CPU", emulated)]
    if job.device == "cuda":
        substitutes += [
            (modeling, "choose_kernel", choose_kernel),
            (nn.functional, "rms_norm", lambda x, _shape, weight, _epsilon: _FusedRmsNorm.apply(x, weight)),
            (nn.functional, "dropout", _dropout),
            (loss, "_gives_float32", lambda *_, **__: True),
            (loss_kernel, "runs_on", lambda *_: True),
            (loss_kernel, "_launch", lambda *_: None),
            (loss, "_add_product", lambda *_: None),  # it allocates nothing, and has no shapes on torch 2.11
        ]
    if job.config.model.lora is not None:
        # peft moves its adapters to their present device, which fake tensors do not allow.
        substitutes.append((nn.Module, "to", lambda module, *_, **__: module))
    with ExitStack() as substituted:
        for substitute in substitutes:
            substituted.enter_context(patch.object(*substitute))
        yield


def choose_kernel(wanted: attention_kernels.KernelQuery, *, flash: bool = True) -> attention_kernels.KernelChoice:
    """Stand in for `attention_kernels.choose_kernel`, as for tensors on a GPU."""
    is_flash = flash and wanted.dtype in (torch.bfloat16, torch.float16)
    return attention_kernels.KernelChoice(_VARLEN if is_flash else attention_kernels.BY_DOCUMENT, ())


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: attention_kernels.Segments, causal: bool, _dropout: float
) -> Tensor:
    """Call torch's operator, which knows its shapes without a GPU, and allocate what its backward pass does.

    Flash attention 2's `mha_varlen_bwd` (csrc/flash_attn/flash_api.cpp) makes the gradients of q, k and v; that of q in
    float32, with 128 rows more for each segment; and if heads share keys, those of keys and values of each head.
    """
    query, key, rows = q.shape, k.shape, len(q) + 128 * (len(segments.query_cu_seqlens) - 1)

    def allocate_and_free(grad: Tensor) -> None:
        held = [grad.new_empty(shape) for shape in (query, key, key)]
        held += [grad.new_empty(shape, dtype=torch.float32) for shape in ((rows, *query[1:]), (rows, query[1]))]
        held += [grad.new_empty((key[0], *query[1:])) for _ in range(2)] if query[1] != key[1] else []

    out = attention_kernels.attend_in_torch(q, k, v, segments, causal)
    if out.requires_grad:
        out.register_hook(allocate_and_free)
    return out


_VARLEN = attention_kernels.AttentionKernel("as on a GPU", lambda _: "", _varlen_attention)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Stand in for `dropout`, one operator on a GPU; a CPU computes it in single ones."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


class _FusedRmsNorm(torch.autograd.Function):
    """A GPU's operator (aten::_fused_rms_norm): it keeps its input, and one float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
