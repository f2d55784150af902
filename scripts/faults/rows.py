"""The rows of the matrix, by group. First in each group are those that every change is tested with."""

import importlib
from typing import Any

from bench import Disturbed, Fault, Faults, Kills, Program, Row, two_starts

AT_ONCE: dict[str, Any] = {"training__async_save": "false"}
BACKGROUND = {"training__async_save": "true"}
NARROW = {"monitor__window_size": 4, "monitor__loss_spike_min_values": 4, "monitor__loss_spike_threshold": 1.02}
LONGER = {"training__save_total_limit": 10, "training__num_train_steps": 16}
ROLLBACK = NARROW | LONGER | {"monitor__on_loss_spike": "rollback", "monitor__rollback_min_steps": 2} | AT_ONCE
EXPORT = {"training__export_at_end": "true", "training__average_checkpoints": 3, "training__save_total_limit": 3}
SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
SAVE = "ds_encdec.checkpoint.manager:CheckpointManager.save"
COMMIT = "ds_encdec.checkpoint.folder:CheckpointFolder.commit"


def met(kind: str, **values: Any) -> Faults:
    return [{"kind": kind, **values}]


def suite(promise: str, *words: str) -> Row:
    """Return a row that tests of the suite hold: words for pytest."""
    chosen = [f"tests/{word}" if ".py" in word else word for word in words]
    return Row(promise, Program(["-m", "pytest", "-q", "--color=no", "-n", "0", *chosen]))


def power_loss(function: str) -> Fault:
    """Return the function of power_loss.py, which imports the package: only when it is called."""
    return lambda bench: getattr(importlib.import_module("power_loss"), function)(bench)


def flush_refused(path: str, number: int, settings: dict[str, Any] = AT_ONCE) -> Disturbed:
    return Disturbed(met("refused_flushes", path=path, number=number), (0,), "step 8 was not saved", settings)


# fmt: off
GROUPS: dict[str, dict[str, Row]] = {
    "Signals and kills": {
        "killed-rank": Row("SIGKILL of one rank in a step: exit code 9 and its name; equal",
            Disturbed(met("killed_rank", at=6, on_rank=1), (9, -9), "is gone without a word", AT_ONCE), 35),
        "kills-in-saves": Row("SIGKILL of both ranks at random moments of saves, in the background and at once: equal",
            Kills(80, SAVE, COMMIT, (BACKGROUND, AT_ONCE), 2, few=4), 60, 60),
        "kills-in-rollbacks": Row("SIGKILL of both ranks at random moments of a rollback: equal to a run without that "
            "data, or with it as it was before the fault",
            Kills(40, "ds_encdec.training.saving:go_back", COMMIT, (ROLLBACK,), rest=Disturbed(met("bad_data", at=15,
                until=15), without=(13, 14, 15), if_rolled_back=True)), 50, 30),
        "kills-in-loads": Row("SIGKILL of both ranks at random moments of a resume, up to its first step: equal",
            Kills(40, "", "ds_encdec.data.loader:LaneLoader.__next__", (AT_ONCE,),
                rest=Disturbed(before=met("killed_rank", at=6, on_rank=1))), 45, 30),
        "kills-in-exports": Row("SIGKILL of both ranks at random moments of export and average: equal, exports too",
            Kills(40, "ds_encdec.training.build:export_at_end", "ds_encdec.training.build:average_last_checkpoints",
                (EXPORT,)), 45, 30),
        "signals": Row("SIGTERM, SIGINT, SIGHUP and SIGUSR1 to every process: saved, exit code 75; equal",
            Disturbed(met("signal_all", signals=SIGNALS, at=6), (75,)), 25),
        "bug-on-a-rank": Row("an exception on one rank: exit code 1 on all, with its words; equal",
            Disturbed(met("bug", at=6, on_rank=1), (1,), "a bug", AT_ONCE)),
        "signals-at-the-edges": suite("signals at the start, behind the last step, while a copy is uploaded; killed "
            "data workers: saved or complete, nothing left over", "faults/test_stopping.py"),
        "killed-launcher": suite("the launcher is killed: its ranks save and end",
            "launch/test_launch_training.py", "-k", "lost_their_launcher"),
        "interrupted-verbs": suite("Ctrl-C and SIGTERM in every verb: one line, exit code 130, or 75 where the work "
            "goes on; nothing half made", "faults/test_interrupts.py"),
    },
    "Power loss": {
        "power-loss-in-a-save": Row("a power loss at any moment of one save under FSDP2: as above",
            power_loss("one_save"), 60),
        "power-loss": Row("a power loss at any moment of a run, its saves, exports and averages: as above",
            power_loss("whole_runs"), minutes=40),
        "flushes-left-out": Row("the same under FSDP2, as if one of seven kinds of flush did nothing: harm is seen "
            "for each", power_loss("flushes_left_out")),
    },
    "Disks": {
        "full-disk": Row("the disk is full behind the first checkpoint: exit code 5; with space equal",
            Disturbed(met("full_disk", after_commits=1, path="RUN/../ballast"), (5,), "Free space", AT_ONCE,
                mount="mount -t tmpfs -o size=32m none DISK"), 30),
        "eio-commit": Row("EIO where the folder is flushed behind the second commit: not saved, nothing is pruned, "
            "equal", flush_refused(r"/checkpoints$", 3, AT_ONCE | {"training__save_total_limit": 1}), 20),
        "no-inodes": Row("the disk takes no more files behind the first checkpoint: exit code 5; elsewhere equal",
            Disturbed(met("no_inodes", after_commits=1, path="RUN/../many"), (5,), "", AT_ONCE,
                mount="mount -t tmpfs -o nr_inodes=400 none DISK")),
        "eio-manifest": Row("EIO where the second manifest is flushed: that save fails with a name, equal",
            flush_refused(r"\.manifest\.json", 2), 15),
        "eio-shard": Row("EIO where a shard is flushed: that save fails with a name, equal",
            flush_refused(r"step-0+8\.tmp/\w+/.*\d", 1), 15),
        "slow-flushes": Row("every flush takes 0.2 s, at a hang limit of 6 s: no false alarm, equal",
            Disturbed(met("slow_flushes", seconds=0.2), settings={"infra__hang_timeout_minutes": 0.1})),
        "true-endings": suite("a disk is full at the end, when the run is stopped, at the last save; the run's folder "
            "is deleted: `run.json` has the true ending; nothing is made again",
            "faults/test_endings.py", "-k", "disk or deleted"),
        "file-size-limit": suite("a limit on the size of files: named; exit code 5 only at the last save",
            "faults/test_refused_resumes.py", "-k", "takes_no_checkpoint"),
    },
    "Memory and limits": {
        "few-descriptors": Row("64 descriptors a process: equal", Disturbed(limits={"RLIMIT_NOFILE": 64}), 20),
        "no-shared-memory": Row("/dev/shm has 4 KB: equal",
            Disturbed(mount="mount -t tmpfs -o size=4k none /dev/shm")),
        "no-memory": suite("a rank can take no more memory: exit code 6, with settings that would have fitted",
            "faults/test_memory_runs_out.py", "-k", "without_memory"),
    },
    "Numbers": {
        "nan-loss": Row("loss and gradients of one rank are NaN in a step: skipped on all; equal to a run without its "
            "data", Disturbed(met("nan_loss", at=6, on_rank=1), without=(6,)), 20),
        "nan-moment": Row("NaN in a moment of one rank before a save: not saved, exit code 7; equal",
            Disturbed(met("damaged_state", tensor="exp_avg", value=float("nan"), on_rank=1, after=7), (7,),
                "steps in a row were skipped", AT_ONCE | {"training__max_consecutive_skipped_steps": 3}), 25),
        "skips-and-rollbacks": suite("losses and gradients that are infinite, explode or jump: skipped or rolled back, "
            "and equal to a run without that data", "faults/test_recovery.py"),
        "states-and-evaluations": suite("weights, moments and evaluations that are not finite, with each answer: "
            "named, never saved, never complete", "faults/test_finite_states.py"),
        "flipped-replicas": suite("a flip in a weight or moment of one replica: ends with names, or rolled back and "
            "equal", "faults/test_replicas.py"),
        "wrong-tokens": suite("a token id of another token, or beyond the vocabulary, and a prepared file damaged in "
            "its middle: `ds-encdec compare` names step and rank, exit code 4", "faults/test_tokens.py"),
    },
    "Slow, stopped and cut ranks": {
        "hanging-rank": suite("a rank hangs or is stopped: exit code 8 on all, stacks of all ranks",
            "launch/test_watchdog.py"),
        "slow-rank": suite("one rank is late in every step: named; with `stop` saved, exit code 75, goes on equal",
            "faults/test_recovery.py", "-k", "slow_rank"),
        "deaf-rank": suite("a rank is killed while another hangs in native code, or is on another machine: exit code "
            "9, named", "faults/test_endings.py", "-k", "killed_rank"),
        "hosts": suite("hosts and launchers that are killed, or cut off: all ranks end, nothing is left over, the run "
            "goes on", "hosts/test_deaths.py", "-m", "hosts"),
    },
    "Clocks and races": {
        "clock-ahead": Row("the clock of one rank jumps two hours ahead in a step, before the watchdog looks: no false "
            "alarm, equal", Disturbed(met("wrong_clock", at=6, on_rank=1, seconds=7200.0, pause_seconds=6.0)), 27),
        "clock-behind": Row("the clock of rank 0 jumps an hour back: equal",
            Disturbed(met("wrong_clock", at=6, on_rank=0, seconds=-3600.0))),
        "two-starts": Row("two starts in one folder at one moment, new and with `--resume auto`: one trains, one ends "
            "with 3, equal", two_starts),
        "stop-in-a-save": Row("the stop file appears in a commit: exit code 75; equal",
            Disturbed([*met("stop_file", after_commits=1, path="RUN/stop"), *met("slow_data", on_rank=0, seconds=0.5)],
                (75,), "ds-encdec stop", AT_ONCE)),
    },
    "Checkpoints, configurations and data": {
        "hostile-checkpoints": suite("manifests, indexes, archives and pickles of another shape, or that name programs "
            "and other files: refused with the file's name, nothing is run",
            "checkpoint/test_hostile_manifests.py", "checkpoint/test_saved_state.py"),
        "damaged-checkpoints": suite("a flipped byte, a missing file, another run's checkpoint, other data: passed "
            "over under `auto`, refused where named", "faults/test_refused_resumes.py", "checkpoint/test_manager.py"),
        "hostile-configurations": suite("YAML, JSON and overrides that are malformed, grow without end when read, or "
            "name devices: exit code 2 with file and line", "config/test_hostile_input.py"),
        "changed-configurations": Row("random changes of configurations: accepted or refused with file and line",
            Program(["tests/nightly/mutate_configs.py", "--count", "2000"])),
        "damaged-data": suite("rows and files that are damaged, cut short, too large, or change while they are read: "
            "named, or passed over and counted", "data/test_local_formats.py", "data/test_prepared.py"),
        "hub": suite("a hub that drops connections, stalls, refuses, limits, or changes: tried again where that helps, "
            "else named", "data/test_hub_reading.py"),
        "keys-and-terminals": suite("keys in the environment and in addresses, names that control a terminal: in no "
            "file and no output", "launch/test_secrets.py", "test_terminal.py"),
    },
}
# fmt: on
