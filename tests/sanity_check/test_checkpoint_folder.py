"""The folder of the sanity check's checkpoint: that there is room, and that nothing stays of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_encdec.sanity_check.checks import checkpoint_folder
from ds_encdec.types import CheckpointError

CHILD = """
import os, signal, sys
from pathlib import Path
from ds_encdec.sanity_check.checks import checkpoint_folder

class Library:
    def __enter__(self):
        pass

    def __exit__(self, *raised):
        return True  # hides whatever a handler raises, as torch.save does

for number in map(int, sys.argv[1:]):
    process = os.fork()  # with all that is imported by now
    if not process:
        with checkpoint_folder(parameters=1000) as folder, Library():
            folder.joinpath("step-1").mkdir()
            folder.joinpath("step-1", "weights").write_bytes(bytes(10**6))
            print(*Path(os.environ["TMPDIR"]).iterdir(), flush=True)
            os.kill(os.getpid(), number)
            print("goes on")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def test_a_signal_takes_the_folder_along_and_ends_the_process(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CHILD, *(str(int(number)) for number in SIGNALS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[1::2] == [str(-number) for number in SIGNALS]
    assert all(Path(line).name.startswith("ds-encdec-sanity-check-") for line in lines[::2])
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_in_the_end_and_handlers_are_what_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with checkpoint_folder(parameters=1000) as folder:
        (folder / "weights").write_bytes(b"1234")
        assert signal.getsignal(signal.SIGTERM) != before
    assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_without_room_is_not_begun() -> None:
    wanted = r"takes about 14,000,000,000.0 GB and .* free: free space there, or set TMPDIR"
    with pytest.raises(CheckpointError, match=wanted), checkpoint_folder(parameters=10**18):
        pytest.fail("was begun")
