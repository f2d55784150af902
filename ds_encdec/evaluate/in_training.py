"""Evaluation during training: losses on held-out sets, and comparisons of generated texts with the right ones. Every
rank generates its share of the texts with a second, plain model, so that the weights are gathered once, not per token.
Nothing is random, and training goes on as if nothing had been generated."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from ds_encdec.base.types import Batch, ConfigError, Example
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.config.schema import FullConfig
from ds_encdec.config.training_sections import LOSS_FIGURES
from ds_encdec.engine.protocol import Engine
from ds_encdec.engine.sharded_engine import compute_dtype, unsharded_copy
from ds_encdec.evaluate.generation import generate, text_of
from ds_encdec.evaluate.metrics import check_metrics, score_texts
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.launch.preemption import Heartbeat
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.monitor.metrics import by_column, eval_metrics, has_losses
from ds_encdec.monitor.sinks import Sample
from ds_encdec.registry.objectives import COLUMNS
from ds_encdec.registry.objectives import FIGURES as OBJECTIVE_FIGURES
from ds_encdec.registry.text_metrics import FIGURES, TEXT_METRICS, text_metric, usable

logger = logging.getLogger(__name__)

SHOWN_SAMPLES = 8  # texts of an evaluation that are kept and shown, the first ones


def evaluate(
    engine: Engine,
    eval_sets: Mapping[str, Callable[[], Sequence[Batch]]],
    collectives: HostCollectives,
    heartbeat: Heartbeat,
) -> dict[str, float]:
    """Return the `eval_metrics` of each held-out set, in all and per task that occurs. Losses are weighted like the
    training loss: per target token, or example, over all ranks. Every rank must have equally many batches (empty ones
    if it has no data), since the engine's collectives are per module call. The held-out split is named ""; other sets
    are `eval/NAME/…`. A set of which no rank has a loss has no figures."""
    metrics: dict[str, float] = {}
    for name, batches in eval_sets.items():
        totals = torch.zeros(2, len(COLUMNS), dtype=torch.float64, device=engine.device)
        for loss in engine.evaluate(batches()):
            heartbeat.beat()
            totals += torch.stack((loss.sums, loss.counts)).double()
        sums, counts = by_column(torch.stack(collectives.gather(totals.cpu())).sum(dim=0))
        if has_losses(counts):
            metrics |= eval_metrics(sums, counts, name)
    return metrics


def usable_metrics(config: FullConfig) -> list[str]:
    """Return the metrics to compute in training: all that need no model of their own and whose packages are installed.
    Raises ConfigError if the package of `training.metric_for_best_model` is not; others are logged once."""
    rows, best = dict(TEXT_METRICS), config.training.best_figure
    if best not in (*LOSS_FIGURES, *FIGURES, *OBJECTIVE_FIGURES) and (own := text_metric(best)) is not None:
        rows[best] = own
    available, left_out = usable([name for name, row in rows.items() if not row.needs_model])
    check_metrics([name for name, row in rows.items() if best in row.figures], field="training.metric_for_best_model")
    if left_out:
        logger.info("texts are judged without %s", left_out)
    return available


def figures_of(
    names: Iterable[str], predictions: Sequence[str], references: Sequence[str], *, best: str
) -> dict[str, float]:
    """Return all figures of the metrics `names`, except users' own that raise, each of which is logged as a warning.
    Raises ConfigError if one of those is `best`, by which the run is judged."""
    figures, left_out = score_texts(names, predictions, references)
    for name, why in left_out.items():
        logger.warning("the metric %s has no figure: %s", name, why)
    if best in left_out:
        raise ConfigError(f"training.metric_for_best_model={best} has no figure: {left_out[best]}")
    return figures


@dataclass(frozen=True)
class Judge:
    """Generates on all ranks for held-out `examples`, the same on every rank, and scores the texts. `stopped` returns
    True once this rank is to save and leave, which does not wait for the texts."""

    config: FullConfig
    engine: Engine
    model_config: Qwen3Seq2SeqConfig
    tokenizer: PreTrainedTokenizerFast
    collectives: HostCollectives
    examples: Callable[[], Sequence[Example]]
    metrics: Iterable[str]
    stopped: Callable[[], bool] = lambda: False

    def __call__(self) -> tuple[dict[str, float], list[Sample]]:
        """Return the figures by their metric names (`eval/…`) and the first samples, equal on all ranks; none if a rank
        was stopped. A collective: an error on one rank, such as memory that runs out, is raised on all."""
        examples = self.collectives.on_every_rank(self.examples)[: self.config.training.eval_generate_samples]
        predictions = self._predict([example.encoder_ids for example in examples])
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()  # the model is freed: training must fit into memory as before
        if predictions is None:
            if self.collectives.rank == 0:
                logger.warning("stopped: this evaluation has no figures of texts (`ds-encdec evaluate` gives some)")
            return {}, []
        references = [text_of(self.tokenizer, example.decoder_ids.tolist()) for example in examples]
        best = self.config.training.metric_for_best_model
        figures = self.collectives.on_rank_zero(lambda: figures_of(self.metrics, predictions, references, best=best))
        inputs = [text_of(self.tokenizer, example.encoder_ids.tolist()) for example in examples[:SHOWN_SAMPLES]]
        return (
            {f"eval/{name}": value for name, value in figures.items()},
            list(map(Sample, inputs, references, predictions)),
        )

    def _predict(self, inputs: Sequence[np.ndarray]) -> list[str] | None:
        training, ranks = self.config.training, self.collectives.world_size
        settings = GenerationSettings(training.generation_max_new_tokens, training.generation_num_beams)
        mine = inputs[self.collectives.rank :: ranks]  # input i is for rank i mod world size
        model = unsharded_copy(self.engine, self.model_config, compute_dtype(training), self.collectives)
        texts = self.collectives.on_every_rank(
            lambda: [text_of(self.tokenizer, ids) for ids in generate(model, mine, settings, self.stopped)]
        )
        shares = self.collectives.gather(None if self.stopped() else texts)
        return None if None in shares else [shares[i % ranks][i // ranks] for i in range(len(inputs))]
