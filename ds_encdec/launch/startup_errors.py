"""Reports a rank's start-up error to the others, which would otherwise wait for it. Torch is imported only if a rank
has to wait, so that rank 0 reports a wrong configuration at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ds_encdec.base.types import DsEncDecError, Preempted
from ds_encdec.launch.world import LAUNCHER_PROGRAMS, World

# The default of `infra.start_timeout_minutes`, which counts because the configuration may be unreadable.
START_MINUTES = 5.0


@contextmanager
def startup_errors_shared(world: World) -> Iterator[None]:
    """Raise an error of the block on every rank, with the rank and host that met it. Use this before the rendezvous. An
    unforeseen error keeps its type and traceback on its own rank."""
    try:
        yield
    except Exception as error:
        if world.world_size == 1:
            raise
        ours = error if isinstance(error, DsEncDecError) else DsEncDecError(f"{type(error).__name__}: {error}")
        if ours is not error:
            ours.__cause__ = error
        # Rank 0 prints its error at once, and the launcher then ends the others.
        ends_others = world.is_main and world.num_nodes == 1 and world.launcher in LAUNCHER_PROGRAMS
        if ours.common is None and not isinstance(ours, Preempted) and not ends_others:
            try:
                from ds_encdec.launch.rendezvous import Rendezvous  # torch

                Rendezvous(world, timedelta(minutes=START_MINUTES)).round("meet", None, error=ours)
            except (ImportError, OSError):  # torch itself is missing or broken here
                pass
            except DsEncDecError as shared:
                if shared.common and type(ours) is not DsEncDecError:
                    raise shared from error
            ours.common = False
        raise ours from ours.__cause__
