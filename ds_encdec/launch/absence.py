"""Reports a rank's start-up error to the others, which would otherwise wait for it. Torch is imported only if a rank
has to wait, so that rank 0 reports a wrong configuration at once."""

import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ds_encdec.base.terminal import print_error
from ds_encdec.base.types import DsEncDecError, Preempted
from ds_encdec.launch.world import LAUNCHER_PROGRAMS, World

RANK_ZERO_SECONDS = 10.0
"""How long a rank waits for rank 0, which mostly meets the same error, before it prints its own."""
START_MINUTES = 5.0
"""The default of `infra.start_timeout_minutes`, which counts because the configuration may be unreadable."""


@contextmanager
def startup_errors_shared(world: World) -> Iterator[None]:
    """Raise an error of the block on every rank, with the rank and host that met it. Use this before the rendezvous. An
    unforeseen error is also printed on this rank, with its traceback."""
    try:
        yield
    except Exception as error:
        if world.world_size == 1:
            raise
        ours = error if isinstance(error, DsEncDecError) else DsEncDecError(f"{type(error).__name__}: {error}")
        if ours is not error:
            ours.__cause__ = error
        if ours.common is None and not isinstance(ours, Preempted):
            _share(world, ours)
        raise ours from ours.__cause__


def _share(world: World, error: DsEncDecError) -> None:
    """Raise the common error of all ranks; return if this rank is to raise its own."""
    if world.is_main and world.num_nodes == 1 and world.launcher in LAUNCHER_PROGRAMS:
        return  # it prints its error now, and the launcher ends the others
    if world.num_nodes == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        time.sleep(RANK_ZERO_SECONDS)  # ranks with rank 0's error are ended before they load torch
    alone = threading.Timer(RANK_ZERO_SECONDS, _print, [world, error])
    if not world.is_main:
        alone.start()
    try:
        from ds_encdec.launch.rendezvous import Rendezvous  # torch

        Rendezvous(world, timedelta(minutes=START_MINUTES)).round("meet", None, error=error)
    except (ImportError, OSError):  # torch itself is missing or broken here
        pass
    except DsEncDecError as shared:
        if shared.common and type(error) is not DsEncDecError:
            raise shared from error
    finally:
        alone.cancel()
    error.common = bool(error.common)  # True once it has been printed


def _print(world: World, error: DsEncDecError) -> None:
    if type(error) is DsEncDecError:  # an unforeseen one: show where it comes from
        traceback.print_exception(error)
    print_error(type(error)(f"rank {world.rank} ({socket.gethostname()}): {error}"))
    error.common = True
