"""The peak of a training step: the engine's states, activations and the loss head, added up at every moment that may be
the worst one.

A step is walked through once: the loss (all activations are there), the head's backward pass, each layer's (activations
go, gradients come), the embedding's, the optimizer's step, and an evaluation. The estimate is the moment with the most
bytes, and says which one it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ds_encdec.memory.activations import (
    LayerMemory,
    Side,
    head_memory,
    layer_memory,
    layers_memory,
    offloaded_bytes,
    shared_memory,
)
from ds_encdec.memory.breakdown import GIB, Breakdown, EngineMemory, Estimate, HostBreakdown
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, with_micro_batch
from ds_encdec.memory.zero import zero_memory

CUDA_CONTEXT_BYTES = 0.6 * GIB
"""Of a process on its GPU: driver, kernels, cuBLAS workspaces. An assumption, and on the high side."""
NCCL_BYTES = 0.6 * GIB
"""Buffers and channels of NCCL's communicators, where there are several ranks. An assumption."""
FRAGMENTATION = 0.03
"""Share of what is allocated that the caching allocator holds beyond it and cannot use. An assumption."""
RANK_PROCESS_BYTES = {"cuda": 3.0 * GIB, "cpu": 0.45 * GIB}
"""Resident memory of a rank's process without any tensor: libraries and Python objects. Measured: 0.36 to 0.41 GiB on
a CPU with torch 2.13 and DeepSpeed 0.19; with CUDA an assumption."""
DATA_WORKER_BYTES = 0.3 * GIB
"""Resident memory of a data worker's process."""


def estimate(job: Job) -> Estimate:
    """What `job` holds at its worst moment on each device, and on the host for each rank."""
    engine = engine_memory(job)
    moment, peak = max(moments(job, engine), key=lambda named: named[1].total)
    peak += Breakdown(framework=_framework(job, peak.total))
    return Estimate(peak=peak, moment=moment, host=_host(job, engine.host))


def engine_memory(job: Job) -> EngineMemory:
    """Parameters, gradients, optimizer and communication under the job's engine."""
    return zero_memory(job) if job.engine == "deepspeed" else fsdp_memory(job)


def moments(job: Job, engine: EngineMemory) -> Iterator[tuple[str, Breakdown]]:
    """Every moment that may be the worst of a step, with what is held then; without the framework's share."""
    resting, head, shared = engine.resting, head_memory(job), shared_memory(job)
    layers, unit = _layers(job), job.layer_parameters
    kept = shared.batch + shared.encoder_output + shared.encoder_norm + shared.decoder_norm
    kept += sum(layer.kept for _, layer in layers)
    at_loss = resting + engine.forward
    yield "loss", at_loss + Breakdown(activations=kept, logits=head.kept + head.chunk)
    yield "backward of the head", at_loss + Breakdown(activations=kept, logits=head.kept + head.rounding)
    # A tied head's gradient waits for the embedding's; an untied one is an ordinary gradient.
    waiting, done = (head.weight_gradient, 0) if job.sizes.tie_word_embeddings else (0.0, job.embedding_parameters)
    encoder_input, decoder_input = layers[0][1].input, layers[-1][1].input
    at_norm = Breakdown(activations=kept + shared.norm_gradients, logits=waiting + decoder_input)
    yield "backward of the decoder's norm", at_loss + at_norm
    kept -= shared.decoder_norm
    beside = 0.0  # what is there for later layers
    for index, (name, layer) in reversed(list(enumerate(layers))):
        output_gradient = 0.0  # of the encoder, by a decoder layer
        if index >= job.encoder_layers:
            output_gradient = encoder_input
        elif index == job.encoder_layers - 1:
            kept -= shared.encoder_output + shared.encoder_norm
            # The decoder's embeddings, which come of one look-up with the encoder's, and their gradient.
            beside = 2 * decoder_input
        kept -= layer.kept
        held = Breakdown(activations=kept + beside, logits=waiting)
        in_work = Breakdown(activations=max(layer.working, layer.kept))
        yield f"backward of {name}", resting + engine.backward(done, unit) + held + in_work
        done += unit
        if engine.layer_reduction is not None:
            left = Breakdown(activations=layer.input + output_gradient)  # the gradients of what it was given
            yield f"reduction of {name}", resting + engine.layer_reduction(done) + held + left
        beside = max(beside, output_gradient)
    embedded = 2 * (encoder_input + decoder_input)  # the gradient of the look-up, in two parts and joined
    # Autograd adds the embedding's gradient, which the engine counts, to the waiting one: the sum is a third.
    in_work = Breakdown(activations=kept + embedded, logits=2 * waiting)
    yield "backward of the embedding", resting + engine.backward(done, job.embedding_parameters) + in_work
    yield "reduction after the backward pass", resting + engine.last_reduction
    yield "optimizer step", resting + engine.step
    if job.config.training.eval_samples:
        yield "evaluation", resting + _evaluation(job)
    yield "building of the engine", engine.build


def _layers(job: Job) -> list[tuple[str, LayerMemory]]:
    """Each layer in the order of the forward pass: its name, and its memory on the device."""
    stacks: dict[Side, list[LayerMemory]] = {side: layers_memory(job, side) for side in ("encoder", "decoder")}
    layers = [(f"{side} layer {index}", layer) for side, stack in stacks.items() for index, layer in enumerate(stack)]
    if job.config.training.activation_offload:  # one layer's are on their way back
        return [(name, dataclasses.replace(layer, kept=0.0)) for name, layer in layers]
    return layers


def _evaluation(job: Job) -> Breakdown:
    """A pass without gradients over an evaluation's micro-batch, between two steps."""
    sized = with_micro_batch(job, job.config.training.per_device_eval_batch_size)
    evaluated = dataclasses.replace(sized, gradient_accumulation_steps=1)  # there are no earlier gradients
    encoder, decoder = layer_memory(evaluated, "encoder"), layer_memory(evaluated, "decoder")
    working, shared = max(encoder.forward, decoder.forward), shared_memory(evaluated)
    activations = shared.batch + shared.encoder_output + encoder.input + decoder.input + working
    in_work = Breakdown(activations=activations, logits=head_memory(evaluated).evaluation)
    return engine_memory(evaluated).forward + in_work


def _framework(job: Job, allocated: float) -> float:
    """What a device holds beside tensors."""
    if job.device == "cpu":
        return RANK_PROCESS_BYTES["cpu"]
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES if job.world_size > 1 else 0.0) + FRAGMENTATION * allocated


def _host(job: Job, engine: HostBreakdown) -> HostBreakdown:
    """Per rank: the engine's, offloaded activations, and processes (on a CPU the rank's own is the `framework`)."""
    activations = 0.0
    if job.config.training.activation_offload:
        activations = offloaded_bytes(job, "encoder") + offloaded_bytes(job, "decoder")
    workers = DATA_WORKER_BYTES * job.config.data.preprocessing_num_workers
    process = workers + (RANK_PROCESS_BYTES["cuda"] if job.device == "cuda" else 0.0)
    return dataclasses.replace(engine, activations=activations, process=engine.process + process)
