"""Losses of preferences, from the log-probabilities of both answers of a pair by the model and by its reference:
`sigmoid` is DPO (arXiv 2305.18290, equation 7), with label smoothing its conservative form; `ipo` (arXiv 2310.12036,
equation 17) takes means over an answer's tokens, as TRL does, so that its bound on the margin holds for answers of any
length; `hinge` is that of SLiC (arXiv 2305.10425). A batch without a reference is one: its first step's rewards are
0."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

from ds_encdec.base.types import Batch, LossSum
from ds_encdec.config.objective_sections import PreferenceConfig
from ds_encdec.config.schema import FullConfig
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.objectives.protocol import Run, example_losses


class PreferenceLosses:
    """The `Losses` of pairs. `measured`: the log-probabilities, [pairs, 2], of the last batch without a reference."""

    measured: Tensor | None = None

    def __init__(self, config: FullConfig, _collectives: HostCollectives) -> None:
        self._settings = config.training.dpo

    def __call__(self, run: Run, batches: Sequence[Batch]) -> Iterator[LossSum]:
        """Yield the loss of each micro-batch; see `protocol.Losses`."""
        for batch in batches:
            token_losses = run(batch).token_losses
            assert token_losses is not None
            # A sum for each answer: an index_add would add in another order each time, on a GPU.
            rest = len(token_losses) - sum(batch.decoder_lengths)
            answers = token_losses.split([*batch.decoder_lengths, rest])[:-1]
            log_probs = -torch.cat([token_losses[:0], *(one.sum()[None] for one in answers)]).view(-1, 2)
            reference = batch.reference
            if reference is None:
                reference = self.measured = log_probs.detach()
            yield loss_sum(log_probs, reference, batch, self._settings)


def loss_sum(log_probs: Tensor, reference: Tensor, batch: Batch, settings: PreferenceConfig) -> LossSum:
    """Return the loss and the figures of the pairs of `batch`. `log_probs`, `reference`: float32 [pairs, 2], summed
    over the tokens of the chosen and of the rejected answer."""
    if settings.loss == "ipo":
        lengths = torch.tensor(batch.decoder_lengths, dtype=torch.float32, device=log_probs.device).view(-1, 2)
        log_probs, reference = log_probs / lengths, reference / lengths
    rewards = settings.beta * (log_probs - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    if settings.loss == "ipo":
        losses = (margins / settings.beta - 1 / (2 * settings.beta)).square()
    elif settings.loss == "hinge":
        losses = relu(1 - margins)
    else:
        smoothing = settings.label_smoothing
        losses = (1 - smoothing) * softplus(-margins) + smoothing * softplus(margins)
    figures = {
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
        "reward_margin": margins,
        "reward_accuracy": (1 + margins.sign()) / 2,  # of equal rewards, as before the first step, a half
        "logp_chosen": log_probs[:, 0],
        "logp_rejected": log_probs[:, 1],
    }
    return example_losses(losses.sum(), batch, {"DPO": losses, **figures})
