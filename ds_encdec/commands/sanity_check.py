"""Run a few minutes of checks in one process, before a long run on many (`ds-encdec sanity-check`). Gradients, ties and
generation are checked in plain torch, because an engine keeps its parameters and gradients in shards."""

import gc
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from transformers.initialization import no_init_weights

from ds_encdec.base import types
from ds_encdec.base.findings import Finding
from ds_encdec.checkpoint.folder import committed_steps
from ds_encdec.checkpoint.manager import CheckpointManager
from ds_encdec.checkpoint.zero_state import open_saved_state
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.shares import with_assumed_batch_size
from ds_encdec.data.build import build_data
from ds_encdec.data.examples.protocol import usable_documents, with_ids
from ds_encdec.data.sources.sources import all_rows, source_entries
from ds_encdec.engine.select import create_engine, join_ranks
from ds_encdec.launch.host_collectives import RunContext
from ds_encdec.launch.memory_errors import is_out_of_memory
from ds_encdec.launch.process_group import shutdown
from ds_encdec.launch.world import discover
from ds_encdec.model.activation_checkpointing import apply_activation_checkpointing
from ds_encdec.model.lora import choose_trained, with_new_adapters
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.parameter_count import canonical_name, trained_shapes, trained_summary
from ds_encdec.monitor.machine import peak_host_bytes
from ds_encdec.monitor.metrics import by_column, mean_loss
from ds_encdec.monitor.monitor import compute_gradient_norm
from ds_encdec.objectives.preferences import PreferenceLosses
from ds_encdec.objectives.protocol import losses_of, run_packed
from ds_encdec.registry.objectives import OBJECTIVES, TASKS
from ds_encdec.training.run_model import new_model

logger = logging.getLogger(__name__)

FRESH_LOSS_TOLERANCE = 0.5  # nats per target token that the loss of fresh weights may be from its expected value
MAX_LOSS = 100.0  # nats per target token, of any weights
MAX_GRADIENT_NORM = 1000.0  # global L2 norm of the gradient of the mean loss, before clipping
OVERFIT_STEPS = 20  # optimizer steps on one micro-batch
# Learning rate of these steps times the hidden size: with Adam, wider models need proportionally smaller steps (Yang et
# al., arXiv 2203.03466). 3e-3 for the quickstart's 128, 4e-4 for Qwen3-0.6B's 1,024.
OVERFIT_RATE_TIMES_HIDDEN_SIZE = 0.4
OVERFIT_FACTOR = 0.9  # largest ratio of the last loss of these steps to the first
RESUME_STEPS = 3  # steps made after a checkpoint, and again after loading it
RESUME_TOLERANCE = 1e-3  # of losses, relative: kernels add in no fixed order, and a lost moment differs more
UNTIMED_STEPS = 3  # first steps, which compile and allocate
DOCUMENTS_PER_SOURCE = 16  # documents that are denoised by every denoiser and put together again
DOCUMENTS_SEARCHED = 256  # documents of a source that are searched for them: some texts are empty, or one token
PROMPT = "The quick brown fox jumps over the lazy dog"
NEW_TOKENS = 8
Result = tuple[bool, str, dict[str, float]]  # of a check: whether it passed, a message, and its figures by name


class Subject:
    """The checks and their objects. Each check reads attributes that the checks in its `needs` have set."""

    def __init__(self, config: FullConfig, context: RunContext) -> None:
        self.config, self.context, self.device = config, context, context.device
        self.opened = ExitStack()  # closes the engine and the data loader

    def _train_step(self) -> float:
        (loss,) = self.engine.losses([self.batch])
        self.engine.backward(loss, num_losses=self.batch.num_losses, last=True)
        self.engine.step()
        return mean_loss(*by_column(torch.stack((loss.sums, loss.counts))))  # before the step

    def _model_loads(self) -> Result:
        config, training = self.config, self.config.training
        self.run_model = run_model = new_model(config)
        weights = run_model.weights
        assert weights is not None
        if config.model.lora is not None:
            weights = with_new_adapters(weights, config.model.lora, run_model.config, training.seed)
        with no_init_weights(), torch.device(self.device):
            model = Qwen3ForSeq2SeqLM(run_model.config)
            choose_trained(model, config)
        model.to(torch.bfloat16 if training.bf16 else torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(canonical_name(name)))
        apply_activation_checkpointing(
            model,
            "full" if training.recomputation == "selective" else training.recomputation,  # selective is FSDP2's
            every_n=training.activation_checkpointing_every_n,
            offload=training.activation_offload,
        )
        model.lm_head.per_token = OBJECTIVES[config.data.objective].weighs_tokens
        self.model = model.train()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        message = trained_summary(trained, parameters) if trained < parameters else f"{parameters:,} parameters"
        return True, message, {"parameters": parameters, "trainable_parameters": trained}

    def _data_reconstructs(self) -> Result:
        config, run_model, on_gpu = self.config, self.run_model, self.device.type == "cuda"
        self.data = build_data(
            config, run_model.tokenizer, run_model.vocabulary, rank=0, world_size=1, num_lanes=1, pin_memory=on_gpu
        )
        self.opened.callback(self.data.loader.close)
        pipeline, kinds = self.data.pipeline, Counter[str]()
        for number, (source, opened) in enumerate(zip(source_entries(config.data), pipeline.sources, strict=True)):
            rows = with_ids(islice(all_rows(opened.source, "sample"), DOCUMENTS_SEARCHED), pipeline.maker)
            documents = usable_documents(rows, pipeline.data.bad_row_limit)
            usable = ((document.key, ids) for document, ids in documents if pipeline.maker.size(ids))
            if not (texts := list(islice(usable, DOCUMENTS_PER_SOURCE))):
                name = f"data.mixture.{number}" if config.data.mixture else "data"
                message = (
                    f"{name} (dataset_name={source.dataset_name}) has no text in the first {DOCUMENTS_SEARCHED} "
                    "documents: check its data_files and text_column, or leave it out"
                )
                return False, message, {}
            for key, ids in texts:
                for kind, holds in pipeline.maker.checked(ids, key):
                    if not holds:
                        return False, f"{kind} does not give back the tokens of {key}", {}
                    kinds[kind] += 1
        message = f"{kinds.total()} examples of {', '.join(kinds)} give back their documents' tokens"
        return True, message, {"examples": kinds.total()}

    def _forward(self) -> Result:
        (self.batch,) = next(self.data.loader)
        encoder_tokens, tokens = self.batch.encoder_tokens, self.batch.target_tokens
        run = partial(run_packed, self.model)
        losses = losses_of(self.config, self.context.collectives)
        (self.loss_sum,) = losses(run, [self.batch.to(self.device)])
        if isinstance(losses, PreferenceLosses):  # the model as it is now is the reference of the steps below
            self.batch = replace(self.batch, reference=losses.measured)
        loss = self.loss_sum.total.item() / self.batch.num_losses
        unit = "example" if TASKS[self.batch.tasks[0]].per_example else "token"
        message = f"{encoder_tokens} encoder and {tokens} target tokens: {loss:.4f} nats per {unit}"
        return math.isfinite(loss), message, {"loss": loss}

    def _initial_loss(self) -> Result:
        sizes, loss = self.run_model.config, self.loss_sum.total.item() / self.batch.num_losses
        if TASKS[self.batch.tasks[0]].per_example:
            return math.isfinite(loss), f"{loss:.4f} per example", {"loss": loss}
        if self.config.model.architecture is None:
            return 0 < loss < MAX_LOSS, f"{loss:.4f}, to be between 0 and {MAX_LOSS:g}", {"loss": loss}
        # Of fresh weights: ln(vocabulary), and the effect of random logits. The head's inputs have the norm sqrt(H),
        # so logits are about N(0, H·initializer_range²), and the mean of their exp is exp(H·initializer_range²/2).
        expected = math.log(sizes.vocab_size) + sizes.hidden_size * sizes.initializer_range**2 / 2
        return (
            abs(loss - expected) <= FRESH_LOSS_TOLERANCE and 0 < loss < MAX_LOSS,
            f"{loss:.4f} of fresh weights, to be within {FRESH_LOSS_TOLERANCE} of {expected:.4f}",
            {"loss": loss, "expected": expected},
        )

    def _backward(self) -> Result:
        (self.loss_sum.total / self.batch.num_losses).backward()
        wanted = trained_shapes(self.config, self.run_model.config)
        parameters = {name: p for own, p in self.model.named_parameters() if (name := canonical_name(own)) in wanted}
        if lacking := [name for name, p in parameters.items() if p.grad is None or not bool(p.grad.isfinite().all())]:
            return False, f"{len(lacking)} parameters have no finite gradient, the first is {lacking[0]}", {}
        return True, f"all {len(parameters)} parameters have finite gradients", {"parameters": len(parameters)}

    def _gradients_reach_both_sides(self) -> Result:
        norms = {
            side: compute_gradient_norm(module)
            for side, module in (("encoder", self.model.encoder), ("decoder", self.model.decoder))
            if any(parameter.requires_grad for parameter in module.parameters())
        }
        message = ", ".join(f"{side} {norm:.3g}" for side, norm in norms.items())
        return min(norms.values(), default=1.0) > 0, f"gradient norm of each that is trained: {message}", norms

    def _gradient_norm(self) -> Result:
        norm, most = compute_gradient_norm(self.model), MAX_GRADIENT_NORM
        return 0 < norm < most, f"{norm:.4g}, to be between 0 and {most:g}", {"gradient_norm": norm}

    def _generation(self) -> Result:
        if not self.run_model.config.num_hidden_layers:
            return True, "an encoder alone writes nothing", {}
        model = self.model.eval()
        ids = self.run_model.tokenizer.encode(PROMPT, add_special_tokens=False)
        generated = model.generate(torch.tensor([ids], device=self.device), max_new_tokens=NEW_TOKENS)[0]
        known = bool(((generated >= 0) & (generated < model.config.vocab_size)).all())
        new = len(generated) - 1  # after the start token
        return known and new > 0, f"{new} tokens, {'' if known else 'not '}all in the vocabulary", {"tokens": new}

    def _overfits_one_batch(self) -> Result:
        for name in ("model", "loss_sum"):  # the engine needs their memory
            vars(self).pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        rate = OVERFIT_RATE_TIMES_HIDDEN_SIZE / self.run_model.config.hidden_size
        training = self.config.training.model_copy(update={"learning_rate": rate})
        config = self.config.model_copy(update={"training": training})
        self.engine = create_engine(config, self.context, self.run_model.config, self.run_model.weights, 1)
        self.opened.callback(vars(self).pop, "engine")
        self.opened.callback(self.engine.close)
        losses, self.step_seconds = list[float](), list[float]()
        for _ in range(OVERFIT_STEPS):
            began = time.monotonic()
            losses.append(self._train_step())
            self.step_seconds.append(time.monotonic() - began)
        first, last = losses[0], losses[-1]
        return (
            last <= OVERFIT_FACTOR * first,
            f"{first:.4f} to {last:.4f} in {OVERFIT_STEPS} steps of {self.context.engine} at rate {rate:.1e}, "
            f"to be at most {OVERFIT_FACTOR:g} times the first",
            {"first_loss": first, "last_loss": last},
        )

    def _checkpoint_resumes(self) -> Result:
        state, context = types.TrainingState(global_step=OVERFIT_STEPS), self.context

        def write_rest(checkpoint: Path) -> None:
            (checkpoint / "trainer.json").write_text(json.dumps({"state": state.to_dict()}))

        with tempfile.TemporaryDirectory(prefix="ds-encdec-sanity-check-") as folder:
            manager = CheckpointManager(Path(folder), context.collectives, engine_name=context.engine, keep=None)
            manager.prepare()
            manager.save(state, self.engine.stage, write_rest, pointers=(), in_background=False)
            if (outcome := manager.collect()) is None or outcome.problem is not None:
                raise types.CheckpointError(outcome.problem if outcome else "nothing was saved")
            checkpoint = committed_steps(Path(folder))[OVERFIT_STEPS]
            num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
            expected = [self._train_step() for _ in range(RESUME_STEPS)]
            self.engine.load(open_saved_state(checkpoint))
        found = [self._train_step() for _ in range(RESUME_STEPS)]
        difference = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
        return (
            difference <= RESUME_TOLERANCE,
            f"losses of {RESUME_STEPS} steps differ by {difference:.1e} of themselves, to be at most "
            f"{RESUME_TOLERANCE:g} ({num_bytes / 1e9:.3g} GB)",
            {"largest_relative_difference": difference, "checkpoint_bytes": num_bytes},
        )

    def _throughput(self) -> Result:
        seconds = statistics.median(self.step_seconds[UNTIMED_STEPS:])
        speed = (self.batch.encoder_tokens + self.batch.target_tokens) / seconds
        where = "device" if self.device.type == "cuda" else "host"
        peak = torch.cuda.max_memory_allocated(self.device) if where == "device" else peak_host_bytes()
        message = f"{speed:,.0f} tokens/s in steps of one micro-batch, peak {where} memory {peak / 1e9:.3g} GB"
        return True, message, {"tokens_per_second": speed, "step_seconds": seconds, "peak_memory_bytes": peak}


# The name of a check, its function, and the checks that must pass before it.
Check = tuple[str, Callable[[Subject], Result], tuple[str, ...]]
CHECKS: tuple[Check, ...] = (  # in the order in which they run
    ("model_loads", Subject._model_loads, ()),
    ("data_reconstructs", Subject._data_reconstructs, ("model_loads",)),
    ("forward", Subject._forward, ("model_loads", "data_reconstructs")),
    ("initial_loss", Subject._initial_loss, ("forward",)),
    ("backward", Subject._backward, ("forward",)),
    ("gradients_reach_both_sides", Subject._gradients_reach_both_sides, ("backward",)),
    ("gradient_norm", Subject._gradient_norm, ("backward",)),
    ("generation", Subject._generation, ("model_loads",)),
    ("overfits_one_batch", Subject._overfits_one_batch, ("forward",)),
    ("checkpoint_resumes", Subject._checkpoint_resumes, ("overfits_one_batch",)),
    ("throughput", Subject._throughput, ("overfits_one_batch",)),
)


def check_config(
    config: FullConfig, report: Callable[[Finding], None] = lambda finding: None, *, checks: Sequence[Check] = CHECKS
) -> tuple[list[Finding], types.DsEncDecError | None]:
    """Run `checks` in this process alone; `report` is called with each finding. Nothing is left behind. Returns all
    findings, and the error that the process fails with: None if all have passed, else a GateError, or a check's own
    error (exit code 2, 4, 5 or 6). Raises ConfigError if this machine cannot run it at all."""
    world = discover(os.environ)
    if world.world_size > 1:
        raise types.ConfigError("ds-encdec sanity-check is one process: start it without deepspeed or torchrun")
    config = on_one_rank(config)
    subject = Subject(config, join_ranks(config, world))
    results, errors = dict[str, Finding](), list[types.DsEncDecError]()
    subject.opened.callback(shutdown)
    with subject.opened:
        for check, function, needs in checks:
            missing = [name for name in needs if name not in results or not results[name].passed]
            result = Finding(check, False, f"skipped, because {' and '.join(missing)} did not pass", skipped=True)
            try:
                if not missing:
                    passed, message, values = function(subject)
                    result = Finding(check, passed, message, values=values)
            except Exception as error:
                logger.debug("%s:", check, exc_info=True)
                result = Finding(check, False, f"{type(error).__name__}: {error}")
                if is_out_of_memory(error):
                    errors.append(types.OutOfMemoryError(result.message))
                elif isinstance(error, types.DsEncDecError) and error.exit_code != types.DsEncDecError.exit_code:
                    errors.append(error)
            results[check] = result
            report(result)
    if failed := [result.check for result in results.values() if not (result.passed or result.skipped)]:
        errors.append(types.GateError(f"the sanity check is not passed: {', '.join(failed)}"))
    return list(results.values()), errors[0] if errors else None


def on_one_rank(config: FullConfig) -> FullConfig:
    """Return `config` for a check in one process: steps of one micro-batch, all at the same learning rate."""
    fields = with_assumed_batch_size(config, config.infra.num_gpus).model_dump()
    fields["data"]["num_lanes"] = 1
    fields["training"] |= {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    fields["training"] |= dict.fromkeys(("global_batch_size", "warmup_ratio", "num_train_epochs"))
    if config.training.activation_checkpointing == "auto":
        fields["training"]["activation_checkpointing"] = "full"  # fits wherever the run's own choice fits
    fields["infra"] |= {"num_gpus": 1, "hybrid_shard_size": None}
    fields["infra"]["deepspeed_extra"].pop("scheduler", None)
    return FullConfig.model_validate(fields)
