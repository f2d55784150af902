"""Compares what ranks hold alike, by digests (`Engine.replica_digest`), and raises the alert when ranks differ."""

import socket
from collections import Counter
from collections.abc import Sequence

from ds_encdec.base.types import ReplicasDifferError, TrainingState
from ds_encdec.engine.protocol import ReplicaDigest
from ds_encdec.launch.agreement import ranks_in_words
from ds_encdec.monitor.recorder import Actions, Alert
from ds_encdec.training.loop_state import Trainer

_OF_OTHERS = 2**63 - 1  # in the places of other groups: never lower than theirs


def due_digest(run: Trainer) -> ReplicaDigest | None:
    """Return the digest of the current state before this process's first step, and each `replica_check_steps`."""
    every = run.config.infra.replica_check_steps
    is_due = every and (run.replicas_equal_at is None or run.state.data_step % every == 0)
    return run.engine.replica_digest() if is_due else None


def places(digest: ReplicaDigest | None) -> list[int]:
    """Return the numbers whose lowest over all ranks `judge_replicas` takes: each group's digest and its complement."""
    if digest is None:
        return []
    numbers = [_OF_OTHERS] * (2 * digest.groups)
    numbers[2 * digest.group : 2 * digest.group + 2] = digest.total, ~digest.total
    return numbers


def compare_replicas(run: Trainer) -> Actions:
    """Compare what ranks hold alike now, as `judge_replicas` does. A collective, unless there is nothing alike."""
    digest = run.engine.replica_digest()
    return Actions() if digest is None else judge_replicas(run, digest, run.collectives.lowest(*places(digest)))


def judge_replicas(
    run: Trainer, digest: ReplicaDigest | None, lowest: Sequence[int], compared: TrainingState | None = None
) -> Actions:
    """Return the rollback that a difference demands, if any. `digest`: of this rank, in the state `compared` (None: the
    current one); `lowest`: over the `places` of all ranks. What was compared before a rollback is void. Raises
    ReplicasDifferError if the answer is `stop`, or all rollbacks are used. A collective."""
    compared = run.state if compared is None else compared
    if digest is None or compared.rollbacks != run.state.rollbacks:
        return Actions()
    if all(least == ~complement for least, complement in zip(lowest[::2], lowest[1::2], strict=True)):
        run.replicas_equal_at = compared.global_step
        return Actions()
    hosts, digests = zip(*run.collectives.gather((socket.gethostname(), digest)), strict=True)
    ranks, message = who_differs(digests, hosts)
    if run.replicas_equal_at is not None:
        message += f"; at step {run.replicas_equal_at} all were equal"
    actions = run.recorder.alert(compared, "replicas_differ", len(ranks), 0, message)
    if actions.stop is not None:
        raise replicas_error(actions.stop, "monitor.on_replicas_differ=stop")
    if actions.rollback and run.state.rollbacks >= (most := run.recorder.settings.max_rollbacks):
        raise replicas_error(actions.rollback, f"all monitor.max_rollbacks={most} rollbacks are used")
    return actions


def who_differs(digests: Sequence[ReplicaDigest], hosts: Sequence[str]) -> tuple[list[int], str]:
    """Return the ranks whose digest is not that of most of their group, or all of a group in which none is most ranks',
    and words about them."""
    known: list[int] = []
    unsure: list[int] = []
    for group in range(digests[0].groups):
        totals = {rank: digest.total for rank, digest in enumerate(digests) if digest.group == group}
        [(usual, count)] = Counter(totals.values()).most_common(1)
        if 2 * count > len(totals):
            known += [rank for rank, total in totals.items() if total != usual]
        else:
            unsure += totals
    places = dict(enumerate(hosts))
    words = []
    if known:
        verb = "differs" if len(known) == 1 else "differ"
        words.append(f"{ranks_in_words(known, places)} {verb} from the others in weights or optimizer states")
    if unsure:
        words.append(
            f"{ranks_in_words(unsure, places)} differ in weights or optimizer states, and at least one of them is wrong"
        )
    return known + unsure, "; ".join(words)


def replicas_error(alert: Alert, why: str) -> ReplicasDifferError:
    """Return the error of a run that does not go on after `alert`."""
    return ReplicasDifferError(
        f"replicas_differ: {alert['message']} ({why}). Checkpoints are untouched: leave such a host out, and go on "
        "with `--resume auto`."
    )
