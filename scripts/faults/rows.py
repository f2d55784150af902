"""The rows of the matrix, by group, in words in docs/faults.md: what is done, and how long it takes on two cores."""

from collections.abc import Mapping
from typing import Any

from bench import Disturbed, Function, Row, Tests

AT_ONCE = {"training__async_save": "false"}
NARROW = {"monitor__window_size": 4, "monitor__loss_spike_min_values": 4, "monitor__loss_spike_threshold": 1.02}
LONGER = {"training__save_total_limit": 10, "training__num_train_steps": 16}
ROLLBACK = NARROW | LONGER | {"monitor__on_loss_spike": "rollback", "monitor__rollback_min_steps": 2}
SKIPS = AT_ONCE | {"training__max_consecutive_skipped_steps": 3}
SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
PRIVATE = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")


def met(kind: str, **values: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, **values}]


def damaged(tensor: str, **values: Any) -> list[dict[str, Any]]:
    return met("damaged_state", tensor=tensor, value=float("nan"), on_rank=1, **values)


def killed_in(what: str, full: int, few: int, seconds: int) -> Row:
    return Row(seconds, Function("moments", what, {"times": full}), Function("moments", what, {"times": few}))


def on_disk(mount_options: str, fault: list[dict[str, Any]], says: str) -> Row:
    return Row(25, Disturbed(fault, (5,), says, AT_ONCE, disk=mount_options))


def flush_refused(path: str, number: int, settings: Mapping[str, Any] = AT_ONCE) -> Row:
    return Row(15, Disturbed(met("refused_flushes", path=path, number=number), (0,), "step 8 was not saved", settings))


def suite(seconds: int, path: str, *names: str, marker: str = "") -> Row:
    nodes = [f"tests/{path}::{name}" for name in names] or [f"tests/{one}" for one in path.split()]
    return Row(seconds, Tests(nodes, marker))


GROUPS: dict[str, dict[str, Row]] = {
    "Signals and kills": {
        "kills-in-saves": killed_in("saves", 80, 4, 60),
        "kills-in-loads": killed_in("loads", 40, 2, 40),
        "kills-in-rollbacks": killed_in("rollbacks", 40, 2, 60),
        "kills-in-exports": killed_in("exports", 40, 2, 40),
        "killed-rank": Row(
            20, Disturbed(met("killed_rank", at=6, on_rank=1), (9, -9), "is gone without a word", AT_ONCE)
        ),
        "bug-on-a-rank": Row(20, Disturbed(met("bug", at=6, on_rank=1), (1,), "a bug", AT_ONCE)),
        "signals": Row(20, Disturbed(met("signal_all", signals=SIGNALS, at=6), (75,))),
        "signals-at-the-edges": suite(60, "faults/test_stopping.py"),
        "killed-worker": suite(
            30, "faults/test_stopping.py", "test_a_worker_that_is_killed_while_a_stop_is_asked_for_is_a_stop"
        ),
        "killed-launcher": suite(
            60, "launch/test_launch_training.py", "test_a_signal_stops_ranks_that_have_lost_their_launcher"
        ),
        "ctrl-c": suite(60, "faults/test_interrupts.py"),
    },
    "Power loss": {
        "power-loss": Row(
            400,
            Function("power_loss", "moments"),
            Function("power_loss", "moments", {"window": True, "engines": ("fsdp",)}),
            quick_seconds=60,
        ),
        "flushes-left-out": Row(300, Function("power_loss", "flushes_left_out")),
    },
    "Disks": {
        "full-disk": on_disk("size=32m", met("full_disk", after_commits=1, path="{disk}/ballast"), "Free space"),
        "no-inodes": on_disk("nr_inodes=400", met("no_inodes", after_commits=1, path="{disk}/many"), ""),
        "read-only-disk": on_disk("size=32m", met("read_only_disk", after_commits=1, path="{disk}"), "Read-only"),
        "true-endings": suite(40, "faults/test_endings.py", "test_on_a_full_disk_the_ending_is_the_true_one"),
        "file-size-limit": suite(
            30, "faults/test_refused_resumes.py", "test_a_disk_that_takes_no_checkpoint_ends_the_run_only_at_its_last"
        ),
        "eio-manifest": flush_refused(r"\.manifest\.json", 2),
        "eio-shard": flush_refused(r"step-0+8\.tmp/\w+/.*\d", 1),
        "eio-commit": flush_refused(r"/checkpoints$", 2, AT_ONCE | {"training__save_total_limit": 1}),
        "slow-flushes": Row(
            40, Disturbed(met("slow_flushes", seconds=0.2), settings={"infra__hang_timeout_minutes": 0.1})
        ),
        "deleted-folder": suite(20, "faults/test_endings.py", "test_a_folder_that_is_deleted_ends_the_run"),
    },
    "Memory and limits": {
        "no-memory": suite(
            40, "faults/test_memory_runs_out.py", "test_a_rank_without_memory_says_what_would_have_fitted"
        ),
        "few-descriptors": Row(15, Disturbed(limits={"RLIMIT_NOFILE": 64})),
        "no-shared-memory": Row(
            40, Disturbed(wrapper=(*PRIVATE, 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "bash"))
        ),
    },
    "Numbers": {
        "nan-loss": Row(20, Disturbed(met("nan_loss", at=6, on_rank=1), without=(6,))),
        "infinite-loss": Row(20, Disturbed(met("infinite_loss", at=6, on_rank=1), without=(6,))),
        "gradient-spike": Row(
            20,
            Disturbed(
                met("gradient_spike", at=10, factor=1000.0),
                settings=NARROW | {"monitor__on_grad_explosion": "skip_step"},
                without=(10,),
            ),
        ),
        "bad-data": Row(
            25, Disturbed(met("bad_data", at=15, until=15), (0,), "Rollback 1 of", ROLLBACK, without=(13, 14, 15))
        ),
        "nan-moment": Row(25, Disturbed(damaged("exp_avg", after=7), (7,), "steps in a row were skipped", SKIPS)),
        "nan-weights-at-the-end": Row(25, Disturbed(damaged("weight", after=12), (7,), "step 12", SKIPS)),
        "states-and-evaluations": suite(90, "faults/test_finite_states.py"),
        "foreign-token": Row(20, Disturbed(met("wrong_token", at=6, on_rank=1, token=1024), (4,), "1024", AT_ONCE)),
        "wrong-token": suite(40, "faults/test_tokens.py"),
    },
    "Slow, stopped and cut ranks": {
        "slow-rank": suite(
            30, "faults/test_recovery.py", "test_a_slow_rank_is_named_and_can_end_the_run_to_go_on_elsewhere"
        ),
        "deaf-rank": suite(
            60, "faults/test_endings.py", "test_a_killed_rank_is_named_and_the_others_do_not_take_the_blame"
        ),
        "hanging-rank": suite(90, "launch/test_watchdog.py"),
        "hosts": suite(400, "hosts/test_deaths.py", marker="hosts"),
    },
    "Clocks and races": {
        "clock-ahead": Row(15, Disturbed(met("wrong_clock", at=6, on_rank=1, seconds=7200.0))),
        "clock-behind": Row(15, Disturbed(met("wrong_clock", at=6, on_rank=0, seconds=-3600.0))),
        "two-starts": Row(60, Function("races", "two_starts")),
        "stop-in-a-save": Row(
            20,
            Disturbed(
                [*met("stop_file", after_commits=1, path="{run}/stop"), *met("slow_data", on_rank=0, seconds=0.5)],
                (75,),
                "ds-encdec stop",
                AT_ONCE,
            ),
        ),
    },
    "Checkpoints, configurations and data": {
        "hostile-checkpoints": suite(60, "checkpoint/test_hostile_manifests.py checkpoint/test_saved_state.py"),
        "damaged-checkpoints": suite(90, "faults/test_refused_resumes.py checkpoint/test_manager.py"),
        "hostile-configurations": suite(20, "config/test_hostile_input.py"),
        "changed-configurations": Row(
            60,
            Function("races", "changed_configurations", {"count": 2000}),
            Function("races", "changed_configurations", {"count": 300}),
            quick_seconds=20,
        ),
        "damaged-data": suite(120, "data/test_local_formats.py data/test_prepared.py"),
    },
    "Doors": {
        "planted-keys": suite(60, "launch/test_secrets.py launch/test_launch_training.py"),
        "control-characters": suite(30, "test_terminal.py"),
        "open-ports": suite(40, "launch/test_meeting.py"),
    },
    "Hubs": {"hub": suite(120, "data/test_hub_reading.py")},
}
