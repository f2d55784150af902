"""The checks of `ds-encdec sanity-check`, in the order in which they run. Gradients, ties and generation are checked in
plain torch, because an engine keeps its parameters and gradients in shards."""

import gc
import json
import math
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from ds_encdec.base.findings import Finding
from ds_encdec.base.quantities import disk_size
from ds_encdec.base.types import Batch, CheckpointError, LossSum, TrainingState
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.checkpoint.zero_state import open_saved_state
from ds_encdec.config.schema import FullConfig
from ds_encdec.data.build import TrainingData, build_data
from ds_encdec.data.examples.protocol import usable_documents, with_ids
from ds_encdec.data.lane import LanePipeline
from ds_encdec.data.sources.sources import OpenSource, all_rows, source_entries
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.select import create_engine
from ds_encdec.engine.sharded_engine import packed_forward
from ds_encdec.launch.host_collectives import RunContext
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.lora import choose_trained, with_new_adapters
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import canonical_name, count_parameters, trained_shapes, trained_summary
from ds_encdec.monitor.machine import peak_host_bytes
from ds_encdec.monitor.monitor import compute_gradient_norm
from ds_encdec.training.run_model import RunModel, new_model

FRESH_LOSS_TOLERANCE = 0.5  # nats per target token that the loss of fresh weights may be from its expected value
MAX_LOSS = 100.0  # nats per target token, of any weights
MAX_GRADIENT_NORM = 1000.0  # global L2 norm of the gradient of the mean loss, before clipping
OVERFIT_STEPS = 20  # optimizer steps on one micro-batch
OVERFIT_RATE_TIMES_HIDDEN_SIZE = 0.4
"""Learning rate of these steps times the hidden size: with Adam, wider models need proportionally smaller steps (Yang
et al., arXiv 2203.03466). 3e-3 for the quickstart's 128, 4e-4 for Qwen3-0.6B's 1,024."""
OVERFIT_FACTOR = 0.9  # largest ratio of the last loss of these steps to the first
RESUME_STEPS = 3  # steps made after a checkpoint, and again after loading it
RESUME_TOLERANCE = 1e-3
"""Relative difference of the losses: kernels that add in no fixed order differ, a lost moment differs more."""
UNTIMED_STEPS = 3  # first steps, which compile and allocate
DOCUMENTS_PER_SOURCE = 16  # documents that are denoised by every denoiser and put together again
DOCUMENTS_SEARCHED = 256  # documents of a source that are searched for them: some texts are empty, or one token
PROMPT = "The quick brown fox jumps over the lazy dog"
NEW_TOKENS = 8
BYTES_PER_PARAMETER = 14  # float32 weights and two moments, and the bfloat16 weights that DeepSpeed keeps beside them
Result = tuple[bool, str, dict[str, float]]
"""The result of a check: whether it passed, a message, and its figures by name."""


class Subject:
    """The objects of the checks. Each check reads attributes that the checks in its `needs` have set."""

    run_model: RunModel
    model: Qwen3ForSeq2SeqLM
    data: TrainingData
    batch: Batch
    loss_sum: LossSum
    loss: float
    engine: Engine
    step_seconds: list[float]

    def __init__(self, config: FullConfig, context: RunContext) -> None:
        self.config, self.context, self.device = config, context, context.device
        self.opened = ExitStack()  # closes the engine and the data loader

    def forget_plain_model(self) -> None:
        """Free the plain model's memory for the engine."""
        for name in ("model", "loss_sum"):
            vars(self).pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def train_step(self) -> float:
        """Make one step of the engine on the batch; return the loss before it, in nats per target token."""
        loss = self.engine.forward(self.batch)
        self.engine.backward(loss, target_tokens=self.batch.target_tokens, last=True)
        self.engine.step()
        return loss.by_denoiser.sum().item() / self.batch.target_tokens


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name, its function, and the checks that must pass before it."""

    name: str
    function: Callable[[Subject], Result]
    needs: tuple[str, ...] = ()

    def look(self, subject: Subject) -> Finding:
        """Run the check. Raises any error of its function."""
        passed, message, values = self.function(subject)
        return Finding(self.name, passed, message, values=values)


def _model_loads(subject: Subject) -> Result:
    subject.run_model = run_model = new_model(subject.config)
    training = subject.config.training
    weights, lora = run_model.weights, subject.config.model.lora
    with no_init_weights(), torch.device(subject.device):
        model = Qwen3ForSeq2SeqLM(run_model.config)
        choose_trained(model, subject.config)
    model.to(torch.bfloat16 if training.bf16 else torch.float32)
    assert weights is not None
    if lora is not None:
        weights = with_new_adapters(weights, lora, run_model.config, training.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(canonical_name(name)))
    mode = training.recomputation
    apply_activation_checkpointing(
        model,
        "full" if mode == "selective" else mode,  # selective is FSDP2's
        every_n=training.activation_checkpointing_every_n,
        offload=training.activation_offload,
    )
    subject.model = model.train()
    parameters, trained = (
        sum(parameter.numel() for parameter in found) for found in (model.parameters(), _trained(model).values())
    )
    message = trained_summary(trained, parameters) if trained < parameters else f"{parameters:,} parameters"
    return True, message, {"parameters": parameters, "trainable_parameters": trained}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _data_reconstructs(subject: Subject) -> Result:
    """Check that documents of every source, denoised by every denoiser, can be put together again."""
    config, run_model = subject.config, subject.run_model
    subject.data = data = build_data(
        config,
        run_model.tokenizer,
        run_model.vocabulary,
        rank=0,
        world_size=1,
        num_lanes=1,
        pin_memory=subject.device.type == "cuda",
    )
    subject.opened.callback(data.loader.close)
    maker, kinds = data.pipeline.maker, Counter[str]()
    for number, (source, opened) in enumerate(zip(source_entries(config.data), data.pipeline.sources, strict=True)):
        if not (texts := _texts_of(opened, data.pipeline)):
            name = f"data.mixture.{number}" if config.data.mixture else "data"
            message = (
                f"{name} (dataset_name={source.dataset_name}) has no text in the first {DOCUMENTS_SEARCHED} "
                "documents: check its data_files and text_column, or leave it out"
            )
            return False, message, {}
        for key, ids in texts:
            for kind, holds in maker.checked(ids, key):
                if not holds:
                    return False, f"{kind} does not give back the tokens of {key}", {}
                kinds[kind] += 1
    message = f"{kinds.total()} examples of {', '.join(kinds)} give back their documents' tokens"
    return True, message, {"examples": kinds.total()}


def _texts_of(opened: OpenSource, pipeline: LanePipeline) -> list[tuple[str, Any]]:
    """Return keys and ids of documents from which examples can be made."""
    rows = islice(all_rows(opened.source, "sample"), DOCUMENTS_SEARCHED)
    texts = (
        (document.key, ids)
        for document, ids in usable_documents(with_ids(rows, pipeline.maker), pipeline.data.bad_row_limit)
        if pipeline.maker.size(ids)
    )
    return list(islice(texts, DOCUMENTS_PER_SOURCE))


def _forward(subject: Subject) -> Result:
    (subject.batch,) = next(subject.data.loader)
    encoder_tokens, tokens = subject.batch.encoder_tokens, subject.batch.target_tokens
    subject.loss_sum = packed_forward(subject.model, subject.batch.to(subject.device))
    subject.loss = loss = subject.loss_sum.total.item() / tokens
    message = f"{encoder_tokens} encoder and {tokens} target tokens: {loss:.4f} nats per token"
    return math.isfinite(loss), message, {"loss": loss}


def _initial_loss(subject: Subject) -> Result:
    """Check the loss of fresh weights: ln(vocabulary), and the effect of their random logits. The states before the
    head have the norm sqrt(H), so logits are about N(0, H·initializer_range²); the mean of their exp is
    exp(H·initializer_range²/2)."""
    sizes, loss = subject.run_model.config, subject.loss
    if subject.config.model.architecture is None:
        return 0 < loss < MAX_LOSS, f"{loss:.4f}, to be between 0 and {MAX_LOSS:g}", {"loss": loss}
    expected = math.log(sizes.vocab_size) + sizes.hidden_size * sizes.initializer_range**2 / 2
    message = f"{loss:.4f} of fresh weights, to be within {FRESH_LOSS_TOLERANCE} of {expected:.4f}"
    passed = abs(loss - expected) <= FRESH_LOSS_TOLERANCE and 0 < loss < MAX_LOSS
    return passed, message, {"loss": loss, "expected": expected}


def _backward(subject: Subject) -> Result:
    (subject.loss_sum.total / subject.batch.target_tokens).backward()
    wanted = trained_shapes(subject.config, subject.run_model.config)
    named = ((canonical_name(name), parameter) for name, parameter in subject.model.named_parameters())
    parameters = {name: parameter for name, parameter in named if name in wanted}
    lacking = [name for name, p in parameters.items() if p.grad is None or not bool(p.grad.isfinite().all())]
    if lacking:
        return False, f"{len(lacking)} parameters have no finite gradient, the first is {lacking[0]}", {}
    return True, f"all {len(parameters)} parameters have finite gradients", {"parameters": len(parameters)}


def _gradients_reach_both_sides(subject: Subject) -> Result:
    sides = {side: getattr(subject.model, side) for side in ("encoder", "decoder")}
    norms = {side: compute_gradient_norm(module) for side, module in sides.items() if _trained(module)}
    message = ", ".join(f"{side} {norm:.3g}" for side, norm in norms.items())
    return min(norms.values(), default=1.0) > 0, f"gradient norm of each that is trained: {message}", norms


def _gradient_norm(subject: Subject) -> Result:
    norm = compute_gradient_norm(subject.model)
    message = f"{norm:.4g}, to be between 0 and {MAX_GRADIENT_NORM:g}"
    return 0 < norm < MAX_GRADIENT_NORM, message, {"gradient_norm": norm}


def _embeddings_tied(subject: Subject) -> Result:
    tied = subject.model.lm_head.weight is subject.model.shared.weight
    wanted = bool(subject.run_model.config.tie_word_embeddings)
    word = {True: "tied", False: "not tied"}
    return tied == wanted, f"{word[tied]} to the output layer, to be {word[wanted]}", {"tied": tied}


def _generation(subject: Subject) -> Result:
    model = subject.model.eval()
    ids = subject.run_model.tokenizer.encode(PROMPT, add_special_tokens=False)
    generated: Tensor = model.generate(torch.tensor([ids], device=subject.device), max_new_tokens=NEW_TOKENS)[0]
    known = bool(((generated >= 0) & (generated < model.config.vocab_size)).all())
    new = len(generated) - 1  # after the start token
    return known and new > 0, f"{new} tokens, {'' if known else 'not '}all in the vocabulary", {"tokens": new}


def _overfits_one_batch(subject: Subject) -> Result:
    subject.forget_plain_model()
    run_model = subject.run_model
    rate = OVERFIT_RATE_TIMES_HIDDEN_SIZE / run_model.config.hidden_size
    training = subject.config.training.model_copy(update={"learning_rate": rate})
    config = subject.config.model_copy(update={"training": training})
    subject.engine = create_engine(config, subject.context, run_model.config, run_model.weights, 1)
    subject.opened.callback(vars(subject).pop, "engine")
    subject.opened.callback(subject.engine.close)
    losses, subject.step_seconds = [], []
    for _ in range(OVERFIT_STEPS):
        began = time.monotonic()
        losses.append(subject.train_step())
        subject.step_seconds.append(time.monotonic() - began)
    first, last = losses[0], losses[-1]
    message = (
        f"{first:.4f} to {last:.4f} in {OVERFIT_STEPS} steps of {subject.context.engine} at rate {rate:.1e}, "
        f"to be at most {OVERFIT_FACTOR:g} times the first"
    )
    return last <= OVERFIT_FACTOR * first, message, {"first_loss": first, "last_loss": last}


def _checkpoint_resumes(subject: Subject) -> Result:
    """Check that steps made after a checkpoint have the same losses when they are made again from it."""
    with checkpoint_folder(count_parameters(subject.run_model.config)) as folder:
        checkpoint = _save(subject, folder)
        num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        expected = [subject.train_step() for _ in range(RESUME_STEPS)]
        subject.engine.load(open_saved_state(checkpoint))
    found = [subject.train_step() for _ in range(RESUME_STEPS)]
    difference = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
    message = (
        f"losses of {RESUME_STEPS} steps differ by {difference:.1e} of themselves, to be at most "
        f"{RESUME_TOLERANCE:g} ({num_bytes / 1e9:.3g} GB)"
    )
    values = {"largest_relative_difference": difference, "checkpoint_bytes": num_bytes}
    return difference <= RESUME_TOLERANCE, message, values


@contextmanager
def checkpoint_folder(parameters: int) -> Iterator[Path]:
    """Make a temporary folder for a checkpoint of `parameters` weights. Raises CheckpointError if the disk is full."""
    where, needed = tempfile.gettempdir(), BYTES_PER_PARAMETER * parameters
    usage = shutil.disk_usage(where)
    if usage.total and usage.free < needed:  # some network file systems report 0 in all
        raise CheckpointError(
            f"a checkpoint takes about {disk_size(needed)} and {where} has {disk_size(usage.free)} free: free space "
            "there, or set TMPDIR to a folder that has it"
        )
    with tempfile.TemporaryDirectory(prefix="ds-encdec-sanity-check-") as folder:
        yield Path(folder)


def _throughput(subject: Subject) -> Result:
    seconds = statistics.median(subject.step_seconds[UNTIMED_STEPS:])
    speed = (subject.batch.encoder_tokens + subject.batch.target_tokens) / seconds
    on_gpu = subject.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(subject.device) if on_gpu else peak_host_bytes()
    where = "device" if on_gpu else "host"
    message = f"{speed:,.0f} tokens/s in steps of one micro-batch, peak {where} memory {peak / 1e9:.3g} GB"
    return True, message, {"tokens_per_second": speed, "step_seconds": seconds, "peak_memory_bytes": peak}


def _save(subject: Subject, folder: Path) -> Path:
    """Save the engine as a run would; return the checkpoint. Raises CheckpointError."""
    context = subject.context
    manager = CheckpointManager(folder, context.collectives, engine_name=context.engine, keep=None)
    manager.prepare()
    state = TrainingState(global_step=OVERFIT_STEPS)

    def write_rest(checkpoint: Path) -> None:
        (checkpoint / "trainer.json").write_text(json.dumps({"state": state.to_dict()}))

    manager.save(state, subject.engine.stage, write_rest, pointers=(), in_background=False)
    outcome = manager.collect()
    if outcome is None or outcome.problem is not None:
        raise CheckpointError(outcome.problem if outcome else "nothing was saved")
    return committed_steps(folder)[OVERFIT_STEPS]


# All checks in the order in which they run.
CHECKS = (
    Check("model_loads", _model_loads),
    Check("data_reconstructs", _data_reconstructs, needs=("model_loads",)),
    Check("forward", _forward, needs=("model_loads", "data_reconstructs")),
    Check("initial_loss", _initial_loss, needs=("forward",)),
    Check("backward", _backward, needs=("forward",)),
    Check("gradients_reach_both_sides", _gradients_reach_both_sides, needs=("backward",)),
    Check("gradient_norm", _gradient_norm, needs=("backward",)),
    Check("embeddings_tied", _embeddings_tied, needs=("model_loads",)),
    Check("generation", _generation, needs=("model_loads",)),
    Check("overfits_one_batch", _overfits_one_batch, needs=("forward",)),
    Check("checkpoint_resumes", _checkpoint_resumes, needs=("overfits_one_batch",)),
    Check("throughput", _throughput, needs=("overfits_one_batch",)),
)
