"""What all tests have in common."""

import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ds_encdec.base.terminal import TerminalHandler

pytest_plugins = ["golden"]

# A busy machine is no failure: neither an example nor the making of examples is judged by the clock.
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")


# Under nohup, or in the background of a script, some signals are ignored, and programs that tests start would inherit
# that. They do not inherit handlers.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    """The process group and the variables of a run in this process would fail another test, somewhere else."""
    before = {name: os.environ.get(name) for name in PLACE}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("this test leaves its process group open")


@pytest.fixture(autouse=True)
def log_of_each_test() -> Iterator[None]:
    """A program that a test has called sets up this process's log, which must not reach the next test."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [*root.handlers]:
        if isinstance(handler, TerminalHandler):
            root.removeHandler(handler)
            root.setLevel(level)
