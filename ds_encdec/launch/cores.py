"""Keeps OpenMP from spinning on cores that ranks share, and words the error for a machine without a GPU."""

from __future__ import annotations

from collections.abc import MutableMapping

from ds_encdec.base.types import ConfigError

_WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_without_spinning(environ: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep soon after a parallel region, unless the user has set how they wait. Call this before
    torch is imported. GNU's default spins for milliseconds. Attention to documents one by one is thousands of regions
    of microseconds: with two threads on busy cores they cost 47 s of CPU time, 19 s with these settings, and 17 s with
    one thread."""
    if not any(name in environ for name in _WAIT_POLICIES):
        environ.update(GOMP_SPINCOUNT="1000", KMP_BLOCKTIME="0")  # torch's own OpenMP is GNU's, conda's is LLVM's


def no_gpu(what: str, named: str = "infra.device=cuda") -> ConfigError:
    """Return the error of a field or option `named` that needs a GPU, on a machine that has `what` ("no GPU")."""
    if named.startswith("--"):
        return ConfigError(f"{named}: this machine has {what}. Leave it out: then a GPU is taken where there is one")
    return ConfigError(
        f"{named}, but this machine has {what}. To run this configuration on the CPU: infra.device=cpu, or auto, which "
        "takes a GPU where there is one; to try ds_encdec here with a small model: --config ds_configs/quickstart.yaml."
    )
