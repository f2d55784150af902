"""Reports a rank's start-up error to the others, which would otherwise wait for it. Torch is imported only if a rank
has to wait, so that rank 0 reports a wrong configuration at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from ds_encdec.base.types import DsEncDecError
from ds_encdec.launch.world import LAUNCHER_PROGRAMS, World


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
        # Rank 0 prints its error at once, and the launcher then ends the others.
        ends_others = world.is_main and world.num_nodes == 1 and world.launcher in LAUNCHER_PROGRAMS
        if ours.common is None and not ends_others:
            try:
                from ds_encdec.launch.rendezvous import Rendezvous  # torch

                # The default of `infra.start_timeout_minutes`, since the configuration may be unreadable.
                Rendezvous(world, timedelta(minutes=5)).round("meet", None, error=ours)
            except (ImportError, OSError):  # torch itself is missing or broken here
                pass
            except DsEncDecError as shared:
                if shared.common and type(ours) is not DsEncDecError:
                    raise shared from error
            ours.common = False
        raise ours from (error.__cause__ if ours is error else error)
