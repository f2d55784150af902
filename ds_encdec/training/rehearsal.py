"""Try, before the first step of a run, the parts that an accelerator would first run long after it."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ds_encdec.base.types import Batch
from ds_encdec.engine.protocol import Engine

logger = logging.getLogger(__name__)


def rehearse(engine: Engine, batches: Sequence[Batch], folder: Path, *, copies: bool) -> None:
    """Copy the state for a save and evaluate a micro-batch: a lack of memory for them shows now, not hours later. Both
    results are dropped and nothing is written, so `folder` need not exist; the host memory of the copies is kept for
    the saves. `copies`: the run saves in the background. Generation is not tried. A collective."""
    if copies:
        staged = engine.stage(folder, copy=True)
        logger.info("copies of a save take %.2f GiB of this rank's host memory", staged.num_bytes / 2**30)
    if batches:
        engine.evaluate(batches[0].to(engine.device))
