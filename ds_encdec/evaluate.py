"""Loss on the held-out split, weighted like the training loss: per target token, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_encdec.engine.protocol import Engine
from ds_encdec.launch.host_collectives import HostCollectives
from ds_encdec.monitor.metrics import by_denoiser, eval_metrics
from ds_encdec.types import DENOISERS, Batch


def evaluate(engine: Engine, batches: Iterable[Batch], collectives: HostCollectives) -> dict[str, float]:
    """Mean loss (nats per target token) and perplexity, in all and for each denoiser that occurs.

    Every rank must bring equally many batches (empty ones where it has no data): the engine's
    collectives are per module call. Returns {} where no rank has a target token.
    """
    device = engine.device
    sums = torch.zeros(2, len(DENOISERS), dtype=torch.float64, device=device)
    for batch in batches:
        loss = engine.evaluate(batch)
        sums += torch.stack((loss.by_denoiser, loss.tokens_by_denoiser)).double()
    losses, tokens = by_denoiser(torch.stack(collectives.gather(sums.cpu())).sum(dim=0))
    return eval_metrics(losses, tokens) if any(tokens.values()) else {}
