"""The peak of a training step: the engine's states, activations and the loss head, added up at every moment that may be
the worst one.

A step is walked through once: the loss (all activations are there), the head's backward pass, each layer's (activations
go, gradients come), the embedding's, the optimizer's step, and an evaluation. The estimate is the moment with the most
bytes, and says which one it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ds_encdec.engines import ENGINES, load
from ds_encdec.memory.activations import MicroBatch
from ds_encdec.memory.breakdown import GIB, Breakdown, EngineMemory, Estimate
from ds_encdec.memory.job import Job, with_micro_batch

CUDA_CONTEXT_BYTES = 0.6 * GIB
"""A process's driver, kernels and cuBLAS workspaces on its GPU. An assumption, and on the high side."""
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
    """Estimate what `job` holds at its worst moment on each device, and on the host for each rank."""
    engine, training = engine_memory(job), job.config.training
    moment, peak = max(step_parts(job, engine), key=lambda part: part[1].total)
    # Beside tensors; on a CPU the rank's own process is all of it.
    framework = RANK_PROCESS_BYTES["cpu"]
    process = engine.host.process + DATA_WORKER_BYTES * job.config.data.preprocessing_num_workers
    if job.device == "cuda":
        framework = CUDA_CONTEXT_BYTES + (NCCL_BYTES if job.world_size > 1 else 0.0) + FRAGMENTATION * peak.total
        process += RANK_PROCESS_BYTES["cuda"]
    offloaded = sum(layer.offloaded for layer in MicroBatch(job).layers()) if training.activation_offload else 0.0
    host = dataclasses.replace(engine.host, activations=offloaded, process=process)
    return Estimate(peak + Breakdown(framework=framework), moment, host)


def engine_memory(job: Job) -> EngineMemory:
    """Parameters, gradients, optimizer and communication under the job's engine."""
    memory: EngineMemory = load(ENGINES[job.engine].memory)(job)
    return memory


def step_parts(job: Job, engine: EngineMemory) -> Iterator[tuple[str, Breakdown]]:
    """Every moment that may be the worst of a step, with what is held then; without the framework's share."""
    resting, unit, batch = engine.resting, job.sizes.layer_parameters, MicroBatch(job)
    layers = batch.layers()
    if job.config.training.activation_offload:  # one layer's are on their way back
        layers = [dataclasses.replace(layer, kept=0.0) for layer in layers]
    kept = sum(layer.kept for layer in layers)
    at_loss = resting + engine.forward + Breakdown(activations=kept)
    yield "loss", at_loss + batch.at_worst("loss")
    yield "backward of the head", at_loss + batch.at_worst("head")
    # A tied head's gradient waits for the embedding's; an untied one is an ordinary gradient.
    done = 0 if job.sizes.tie_word_embeddings else job.embedding_parameters
    for layer in reversed(layers):
        kept -= layer.kept
        below = resting + Breakdown(activations=kept)
        yield f"backward of {layer.name}", below + engine.backward(done, unit) + layer.working
        done += unit
    # Autograd adds the embedding's gradient, which the engine counts, to a waiting one: the sum is a third.
    at_embedding = resting + engine.backward(done, job.embedding_parameters)
    yield "backward of the embedding", at_embedding + batch.at_worst("embedding")
    yield "reduction after the backward pass", resting + engine.last_reduction
    yield "optimizer step", resting + engine.step
    if job.config.training.eval_samples:
        sized = dataclasses.replace(job, gradient_accumulation_steps=1)  # there are no earlier gradients
        sized = with_micro_batch(sized, job.config.training.per_device_eval_batch_size)
        yield "evaluation", resting + engine_memory(sized).forward + MicroBatch(sized).at_worst("evaluation")
    yield "building of the engine", engine.build
