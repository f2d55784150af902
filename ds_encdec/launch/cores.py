"""The cores of this machine, which ranks share with each other; and the error where it has no GPU."""

from __future__ import annotations

from collections.abc import MutableMapping

from ds_encdec.base.types import ConfigError

_WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_without_spinning(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP's threads sleep soon after a parallel region. Call this before torch is imported.

    GNU's default is to spin for milliseconds. Documents that are attended to one by one are thousands of regions of
    microseconds: with two threads and other work on the cores they cost 47 s of CPU time where these settings cost 19 s
    and one thread 17 s. What the user has set is left.
    """
    if not any(name in environ for name in _WAIT_POLICIES):
        environ.update(GOMP_SPINCOUNT="1000", KMP_BLOCKTIME="0")  # torch's own OpenMP is GNU's, conda's is LLVM's


def no_gpu(what: str, named: str = "infra.device=cuda") -> ConfigError:
    """The error of who wants a GPU, as is `named`, on a machine that has `what`, in words."""
    if named.startswith("--"):
        return ConfigError(f"{named}: this machine has {what}. Leave it out: then a GPU is taken where there is one")
    return ConfigError(
        f"{named}, but this machine has {what}. To run this configuration on the CPU: infra.device=cpu, or auto, which "
        "takes a GPU where there is one; to try ds_encdec here with a small model: --config ds_configs/quickstart.yaml."
    )
