"""How the lanes, the batch and the shards of a run are divided among its ranks: the one place that decides and refuses.

A fact that does not divide is the same mistake wherever it is found (a plan, an estimate, a start, a resume), so it has
one message.
"""

from __future__ import annotations

from ds_encdec.config.training_sections import InfraConfig
from ds_encdec.types import ConfigError


def per_rank(count: int, ranks: int, what: str, *, multiple: bool = False) -> int:
    """One rank's share of `count` things (`what`, with the field that sets their number).

    Raises ConfigError where the ranks do not divide them. It names the numbers of ranks that do, or with `multiple`
    the next number of things that fits, for what is easier changed than the ranks.
    """
    if count % ranks == 0:
        return count // ranks
    if multiple:
        fix = f"make it a multiple of {ranks}, such as {-(-count // ranks) * ranks}"
    else:
        divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
        fix = f"use one of these numbers of ranks: {', '.join(divisors)}"
    raise ConfigError(f"{what}={count} cannot be divided evenly among {ranks} ranks: {fix}.")


def mesh_shape(infra: InfraConfig, ranks: int, ranks_per_node: int) -> tuple[int, int]:
    """How many groups of ranks replicate each other, and how many ranks of each shard the states among them.

    Their product is `ranks`. Raises ConfigError for a hybrid whose shards do not divide the ranks.
    """
    if infra.sharding_stage == "zero0":
        return ranks, 1
    if not infra.sharding_stage.endswith("_hybrid"):
        return 1, ranks
    shards = infra.hybrid_shard_size or min(ranks_per_node, ranks)
    origin = "infra.hybrid_shard_size" if infra.hybrid_shard_size else "the ranks of a node"
    return replicas(ranks, shards, f"infra.sharding_stage={infra.sharding_stage}: {shards} shards ({origin})"), shards


def replicas(ranks: int, shards: int, what: str) -> int:
    """How many groups of `shards` ranks there are; `what` names them. Raises ConfigError where some ranks are left."""
    if ranks % shards:
        raise ConfigError(f"{what} do not divide {ranks} ranks: set infra.hybrid_shard_size to a divisor of {ranks}.")
    return ranks // shards
