"""The peak of a training step: states, activations and loss head, summed at each moment that may be the worst.

Activations of layers and loss head are sums of products of sizes: `8*D*I` is four 16-bit tensors of decoder tokens ×
intermediate size. activations.json has them for each kind of numbers and mode of activation checkpointing.
scripts/dev/memory_formulas.py writes it from traces of a small model: exact in every storage, for models of any size.
Formulas here cover only attention on a GPU without a flash kernel, which no trace without a GPU shows.

Symbols (docs/memory.md explains the terms): `E`, `D` encoder and decoder tokens of a micro-batch; `C` tokens of a chunk
of the loss; `m` keys of the longest document under merged attention; `s` segments of a flash kernel. `H`, `I`, `V`
hidden and intermediate size and rows of the vocabulary; `h`, `k` query and key/value heads, `d` their width; `Q` = h·d,
`K` = k·d; `r` rank of adapters."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import ceil, inf, prod
from pathlib import Path
from typing import Any, NamedTuple

from ds_encdec.base.quantities import GIB
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.objective_sections import SIMILARITIES
from ds_encdec.memory.breakdown import Breakdown, EngineMemory, Estimate
from ds_encdec.memory.fsdp import fsdp_memory
from ds_encdec.memory.job import Job, Parameters, Side, with_micro_batch
from ds_encdec.memory.zero import zero_memory
from ds_encdec.model.cross_attention import form_of
from ds_encdec.model.parameter_count import parameter_shapes
from ds_encdec.registry.engines import ByEngine
from ds_encdec.registry.objectives import OBJECTIVES

# Driver, kernels and cuBLAS workspaces of a process on its GPU. Assumed, on the high side.
CUDA_CONTEXT_BYTES = 0.6 * GIB
NCCL_BYTES = 0.6 * GIB  # Buffers and channels of each NCCL communicator, if there are several ranks. Assumed
FRAGMENTATION = 0.03  # Share of allocated memory that the caching allocator holds and cannot use. Assumed
# A rank's process without tensors. Measured on CPUs (torch 2.13, DeepSpeed 0.19): 0.36-0.41 GiB; assumed with CUDA.
RANK_PROCESS_BYTES = {"cuda": 3.0 * GIB, "cpu": 0.45 * GIB}
DATA_WORKER_BYTES = 0.3 * GIB  # Resident memory of a data worker
TABLE = Path(__file__).with_name("activations.json")
ENCODER_FORMS = ("encoder", "encoder with head")  # in the table, of an encoder alone without a head, and with one
_FLOAT32 = 4
_HEAD_WEIGHT = "H*V"  # Product for the gradient of the output layer's weight
# Both sides of a mean document of a micro-batch. Web-like documents have 945, and 585 in the worst of 300 batches.
_TOKENS_PER_DOCUMENT = 512


def estimate(job: Job) -> Estimate:
    """Estimate the worst moment of `job` on each device, and the host memory of each rank."""
    engine, training = engine_memory(job), job.config.training
    moment, peak = max(step_parts(job, engine), key=lambda part: part[1].total)
    # Memory beside tensors; on a CPU the rank's process is all of it.
    framework = RANK_PROCESS_BYTES["cpu"]
    process = engine.host.process + DATA_WORKER_BYTES * job.config.data.preprocessing_num_workers
    if job.device == "cuda":
        nccl = NCCL_BYTES * engine.communicators * (job.world_size > 1)
        framework = CUDA_CONTEXT_BYTES + nccl + FRAGMENTATION * peak.total
        process += RANK_PROCESS_BYTES["cuda"]
    copied = MicroBatch(job, keeps_inputs=engine.keeps_frozen_inputs).kept_on_host()
    offloaded = copied * (1.5 if job.device == "cuda" else 1.0) * training.activation_offload  # half more if pinned
    parameters = engine.host.parameters + teaching(job, engine).host
    host = engine.host._replace(activations=offloaded, process=process, parameters=parameters)
    return Estimate(peak + Breakdown(framework=framework), moment, host)


def engine_memory(job: Job) -> EngineMemory:
    """Return parameters, gradients, optimizer and communication under the job's engine."""
    return _MEMORY[job.engine](job)


_MEMORY: ByEngine[Callable[[Job], EngineMemory]] = ByEngine(deepspeed=zero_memory, fsdp=fsdp_memory)


def step_parts(job: Job, engine: EngineMemory) -> Iterator[tuple[str, Breakdown]]:
    """Yield each moment that may be the worst of a step, with its bytes except for the framework's share."""
    teacher = teaching(job, engine)
    resting = engine.resting + _cached(job) + teacher.resting
    embedding, training = job.model.of("shared."), job.config.training
    batch = MicroBatch(job, keeps_inputs=engine.keeps_frozen_inputs)
    # What is offloaded comes back for one layer's work at a time.
    layers = [layer._replace(kept=layer.kept * (not training.activation_offload)) for layer in batch.layers()]
    kept = sum(layer.kept for layer in layers)
    at_loss = resting + engine.forward + Breakdown(activations=kept)
    yield "forward pass of the teacher", at_loss + teacher.forward
    yield "loss", at_loss + batch.at_worst("loss") + teacher.loss
    yield "backward of the head", at_loss + batch.at_worst("head")
    # A tied head's gradient waits for the embedding's; an untied one is an ordinary gradient.
    done = job.model.of("lm_head.")
    for layer in reversed(layers):
        kept -= layer.kept
        unit = job.model.layers[layer.name]
        below = resting + Breakdown(activations=kept)
        yield f"backward of {layer.name}", below + engine.backward(done, unit) + layer.working
        yield f"reduction behind {layer.name}", below + engine.behind(done, unit)
        done += unit
    # Autograd adds the embedding's gradient, which the engine counts, to a waiting one: the sum is a third.
    yield "backward of the embedding", resting + engine.backward(done, embedding) + batch.at_worst("embedding")
    yield "reduction after the backward pass", resting + engine.last_reduction
    yield "optimizer step", resting + engine.step
    if training.eval_samples:
        # There are no earlier gradients.
        sized = with_micro_batch(replace(job, gradient_accumulation_steps=1), training.per_device_eval_batch_size)
        forward, beside = engine_memory(sized).forward, teaching(sized, engine).loss
        yield "evaluation", resting + forward + MicroBatch(sized).at_worst("evaluation") + beside
    if training.eval_generate_samples:
        yield "generation", resting + _generation(job)
    yield "building of the engine", engine.build


def _cached(job: Job) -> Breakdown:
    """Return the bytes of the embeddings of a step, which gradient caching keeps on each rank: six copies and gradients
    of all texts, which are assumed to have a quarter of their maximum length, and of a block of similarities."""
    if OBJECTIVES[job.config.data.objective].has_head:
        return Breakdown()
    data, lanes = job.config.data, job.gradient_accumulation_steps * job.world_size
    most = data.max_examples_per_micro_batch * (2 + data.num_negatives)
    texts = lanes * min(4 * job.encoder_tokens / data.max_encoder_length, most)
    return Breakdown(activations=6 * _FLOAT32 * (texts * job.sizes.hidden_size + min(SIMILARITIES, texts**2 / 4)))


class Teaching(NamedTuple):
    """The bytes of a teacher: at rest, in its forward pass, and beside the student's in the loss. `host`: offloaded."""

    resting: Breakdown = Breakdown()
    forward: Breakdown = Breakdown()
    loss: Breakdown = Breakdown()
    host: float = 0.0


def teaching(job: Job, engine: EngineMemory) -> Teaching:
    """Return the memory of the job's teacher. A decoder is assumed to read all tokens of a micro-batch as texts."""
    sizes, each = job.teacher, job.compute_bytes
    if sizes is None:
        return Teaching()
    model = Parameters(parameter_shapes(sizes), {})
    all_parameters, layers = model.of("").all, [layer.all for layer in model.layers.values()]
    read = (job.encoder_tokens, job.decoder_tokens)
    if sizes.num_encoder_layers == 0:
        read = 0, sum(read) + 1
    # Without a vocabulary: logits are not made in the forward pass.
    alone = replace(
        job, sizes=replace(sizes, vocab_size=0), model=model, encoder_tokens=read[0], decoder_tokens=read[1]
    )
    working = MicroBatch(alone).at_worst("evaluation")
    root = all_parameters - sum(layers)
    whole = min(all_parameters, max(engine.gathers, root + 2 * max(layers))) if engine.gathers else 0
    held = each * all_parameters / engine.frozen_shares
    stays = engine.gathers == inf
    gathered = Breakdown(communication=each * whole * (not stays))
    # Its states, those of the tokens that it teaches, and the student's in that order.
    states = each * (read[1] * sizes.hidden_size + job.decoder_tokens * (sizes.hidden_size + job.sizes.hidden_size))
    chunk = min(job.config.model.loss_chunk_tokens, job.decoder_tokens)
    # The kernel needs its logits alone; operators also its probabilities, and the student's logits a second time.
    logits = _FLOAT32 * chunk * sizes.vocab_size
    logits += _FLOAT32 * chunk * (sizes.vocab_size + job.sizes.vocab_size) * (job.device == "cpu")
    logits += _FLOAT32 * sizes.vocab_size * sizes.hidden_size * job.emulates_bf16
    return Teaching(
        Breakdown(weights=held * (not engine.offloads_frozen) + each * whole * stays),
        gathered + working,
        gathered + Breakdown(activations=states, logits=logits),
        held * engine.offloads_frozen,
    )


def _generation(job: Job) -> Breakdown:
    """Return the bytes of generating in an evaluation: a whole copy of the model, and caches of keys and values. Until
    its first step is over an aligned model keeps the encoder's states at all heights, for any number of beams."""
    training, sizes, length = job.config.training, job.sizes, job.longest_document[0]
    settings = GenerationSettings(training.generation_max_new_tokens, training.generation_num_beams)
    row = settings.num_beams * (length + settings.max_new_tokens)
    tokens = max(row, min(ceil(training.eval_generate_samples / job.world_size) * row, settings.batch_tokens))
    inputs = tokens * length / (length + settings.max_new_tokens)
    cached = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    states = sizes.hidden_size * (sizes.num_encoder_layers + 1) * form_of(sizes).is_aligned / settings.num_beams
    numbers = max(cached * tokens, (cached + states) * inputs)
    return Breakdown(weights=job.compute_bytes * job.parameters, activations=job.compute_bytes * numbers)


class Layer(NamedTuple):
    """A layer's pass over a micro-batch, in bytes. `kept`: until its backward pass; `working`: at its worst."""

    name: str
    kept: float
    working: Breakdown


class MicroBatch:
    """A micro-batch's pass on one rank. With `keeps_inputs`, products with frozen weights keep their inputs."""

    def __init__(self, job: Job, *, keeps_inputs: bool = False) -> None:
        sizes, (encoder_length, decoder_length) = job.sizes, job.longest_document
        # Documents of `_TOKENS_PER_DOCUMENT` tokens, or of the maximum length if shorter, and the padding.
        documents = max(
            (job.encoder_tokens + job.decoder_tokens) / _TOKENS_PER_DOCUMENT,
            job.encoder_tokens / encoder_length,
            job.decoder_tokens / decoder_length,
        )
        self._job, lora = job, job.config.model.lora
        self._symbols = {
            "E": job.encoder_tokens,
            "D": job.decoder_tokens,
            "C": min(job.config.model.loss_chunk_tokens, job.decoder_tokens or job.encoder_tokens),
            "m": encoder_length + decoder_length,
            "s": (min(ceil(documents), job.config.data.max_examples_per_micro_batch) + 1) * job.uses_flash,
            "H": sizes.hidden_size,
            "I": sizes.intermediate_size,
            "V": sizes.vocab_size,
            "h": sizes.num_attention_heads,
            "k": sizes.num_key_value_heads,
            "d": sizes.head_dim,
            "0": 0,
            "Q": sizes.num_attention_heads * sizes.head_dim,
            "K": sizes.num_key_value_heads * sizes.head_dim,
            "r": 0 if lora is None else lora.r,
        }
        self._encoder_states = job.encoder_tokens * sizes.hidden_size * job.compute_bytes
        training, mode = job.config.training, job.config.training.recomputation
        self._mode = "full" if mode == "every_n" else mode
        self._interval = {"none": 0, "every_n": training.activation_checkpointing_every_n}.get(mode, 1)
        numbers = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
        adapters = "" if lora is None else " lora dropout" if lora.lora_dropout else " lora"
        self._kind = f"{job.device} {numbers}{' emulated' * (job.emulates_bf16 and training.bf16)}{adapters}"
        self._keeps_inputs = keeps_inputs and lora is not None
        self._has_frozen_encoder = not (job.model.of("encoder.").trained or job.model.of("shared.").trained)
        self._is_head_trained = ("shared" if sizes.tie_word_embeddings else "lm_head") + ".weight" in job.model.trained

    def at_worst(self, part: str) -> Breakdown:
        """Return the bytes beyond kept ones: in `loss`, the backward pass of `head` or `embedding`, or `evaluation`."""
        is_counted = self._is_head_trained and (part != "embedding" or self._job.sizes.tie_word_embeddings)
        formulas = self._formulas("none" if part == "evaluation" else self._mode)[part]
        worst = self._worst(formulas, "" if is_counted else _HEAD_WEIGHT)
        return worst + Breakdown(activations=-self._unread() if part in ("loss", "head") else 0.0)

    def layers(self) -> Iterator[Layer]:
        """Yield all layers in the order of the forward pass."""
        sizes, model, make = self._job.sizes, self._job.model, cache(self._layer)  # most layers are alike
        # The backward pass of a stack ends at its first layer with trained parameters; the decoder's reads the encoder.
        is_reached: dict[Side, bool] = dict.fromkeys(("encoder", "decoder"), "shared.weight" in model.trained)
        read = {height - 1 for height in sizes.heights if form_of(sizes).has_own_norm}
        for side, index in sizes.layers:
            name = f"{side} layer {index}"
            for reached in {side, "decoder"}:
                is_reached[reached] = is_reached[reached] or bool(model.layers[name].trained)
            if is_reached[side]:
                recomputes = self._interval > 0 and index % self._interval == 0
                yield Layer(name, *make(side, recomputes, is_last=(side, index) == sizes.layers[-1]))
            else:  # its forward pass alone; norms of decoder layers keep the states of a frozen encoder
                kept = self._encoder_states * (side == "encoder" and index in read)
                yield Layer(name, kept, self.at_worst("evaluation"))

    def kept_on_host(self) -> float:
        """Return the bytes that leave the device: all that layers keep, and an aligned encoder's last states."""
        return sum(layer.kept for layer in self.layers()) + self._encoder_states * form_of(self._job.sizes).is_aligned

    def _layer(self, side: Side, recomputes: bool, *, is_last: bool) -> tuple[float, Breakdown]:
        job, formulas = self._job, self._formulas(self._mode if recomputes else "none")
        # A tied head's gradient waits beside all layers; an untied one's is one of the engine's.
        without = "" if self._is_head_trained and job.sizes.tie_word_embeddings else _HEAD_WEIGHT
        at_work: list[str] = formulas["last decoder" if is_last and side == "decoder" else side]
        kept, working = self._value(formulas["kept"][side]), self._worst(at_work, without)
        whole, norms = self._formulas("none"), f"kept {job.sizes.qk_norm} {job.sizes.norm_position}"
        fewer = self._value(whole["kept"][side]) - self._value(whole.get(norms, whole["kept"])[side])  # than Qwen3's
        tokens, training = self._symbols[side[0].upper()], job.config.training
        of_mask = (1 if job.device == "cuda" else job.compute_bytes) * (training.residual_dropout > 0)
        masks = 2 * tokens * job.sizes.hidden_size * of_mask
        # What only frozen products keep: dropout gives adapters other inputs, emulation copies.
        of_frozen, wide = 0.0, self._symbols["Q"] + job.sizes.intermediate_size
        if self._keeps_inputs and job.emulates_bf16:
            inputs = 5 * tokens + 2 * self._symbols["E"] * (side == "decoder")
            of_frozen = _FLOAT32 * (tokens * wide + inputs * job.sizes.hidden_size)
        elif self._keeps_inputs and self._kind.endswith("dropout"):
            of_frozen = job.compute_bytes * tokens * (2 * job.sizes.hidden_size + wide)
        # Beside a frozen encoder no gradient of its states waits for another layer's.
        waiting = self._encoder_states * (self._has_frozen_encoder and not is_last)
        unread = (self._unread() + waiting) * (side == "decoder")
        kept += 0 if recomputes else masks + of_frozen - fewer
        working += Breakdown(activations=masks - unread - fewer)
        if not job.uses_flash and (job.device == "cuda" or training.attention_dropout):
            scores, gradients = self._scores(side)
            kept += 0 if recomputes else scores
            swiglu = self._value(at_work[0]) - self._value(at_work[0].replace("*I", "*0"))  # done by then
            working += Breakdown(activations=scores + max(gradients - swiglu, 0.0))
        return kept, working

    def _unread(self) -> float:
        """Return the bytes that the encoder's last norm does not keep if it and the embedding are frozen."""
        if not self._has_frozen_encoder:
            return 0.0
        head = self._formulas(self._mode)["head"][0]
        kept = self._value(head) - self._value(head, "E*H") - 2 * self._encoder_states  # of the embedding and the norm
        return max(kept, 0.0)

    def _scores(self, side: Side) -> tuple[float, float]:
        """Return the bytes that attention without a flash kernel keeps, and those of its backward pass. Documents are
        assumed to have their maximum length. Each keeps its softmax, keys and values at full width, and with dropout
        the mask and its result. Three float32 scores of one document exist at a time, and gradients of queries, keys
        and values as wide as the queries. A CPU computes all this in float32."""
        job, symbols, (queries, keys) = self._job, self._symbols, self._job.longest_document
        queries, keys = (queries, queries) if side == "encoder" else (keys, queries + keys)
        heads, tokens, dtype = job.sizes.num_attention_heads, symbols[side[0].upper()], job.compute_bytes
        all_keys = symbols["E"] + (symbols["D"] if side == "decoder" else 0)
        if job.device == "cpu":  # instead of its kernel's queries, keys, values and output
            instead = 2 * (tokens * symbols["Q"] + all_keys * symbols["K"])
            kept = float(_FLOAT32 * (3 * heads * tokens * keys + (tokens + 2 * all_keys) * symbols["Q"] - instead))
        else:
            of_score = dtype + (1 + dtype) * (job.config.training.attention_dropout > 0)
            kept = tokens / queries * keys * heads * (queries * of_score + 2 * job.sizes.head_dim * dtype)
        return kept, 3 * heads * queries * keys * _FLOAT32 + (tokens + 2 * all_keys) * symbols["Q"] * dtype

    def _formulas(self, mode: str) -> dict[str, Any]:
        return formulas_of(table_form(self._job), self._kind, mode)

    def _worst(self, formulas: list[str], without: str) -> Breakdown:
        moments = (
            Breakdown(activations=self._value(formula, without), logits=self._value(formula, without, logits=True))
            for formula in formulas
        )
        return max(moments, key=lambda moment: moment.total, default=Breakdown())

    def _value(self, formula: str, without: str = "", *, logits: bool = False) -> float:
        """Return the bytes of the terms with the vocabulary (`logits`), or of the others."""
        return sum(
            times * prod([self._symbols[name] for name in product.split("*")])
            for times, product in _terms(formula, logits)
            if product != without
        )


def table_form(job: Job) -> str:
    """Return the name of the model's form in activations.json: its cross-attention, or that of an encoder alone."""
    has_head = OBJECTIVES[job.config.data.objective].has_head
    return job.sizes.cross_attention if job.sizes.num_hidden_layers else ENCODER_FORMS[has_head]


@cache
def formulas_of(form: str, kind: str, mode: str) -> dict[str, Any]:
    """Return the formulas of activations.json, by part of the pass: those of the first form, unless `form` has own."""
    table = json.loads(TABLE.read_text())
    return {part: formulas for each in (next(iter(table)), form) for part, formulas in table[each][kind][mode].items()}


@cache
def _terms(formula: str, logits: bool) -> tuple[tuple[int, str], ...]:
    terms = (term.split("*", 1) for term in formula.split(" + "))
    return tuple((int(times), product) for times, product in terms if ("V" in product) == logits)
