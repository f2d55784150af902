"""What one rank of `run_ranks` runs: join the group the way a real run does, call the target, save its result."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover


def main(target: str, folder: Path) -> None:
    faulthandler.enable()  # run_ranks aborts ranks that hang: their stacks end up in the log
    world = discover(os.environ)
    device = choose_device("cpu", world)
    engine = "fsdp" if "WITHOUT_DEEPSPEED" in os.environ else "deepspeed"
    init_process_group(world, device, timedelta(seconds=90), engine)
    file_name, function_name = target.split(":")
    function = getattr(importlib.import_module(file_name.removesuffix(".py")), function_name)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    result = function(**arguments)
    torch.save(result, folder / f"result{world.rank}.pt")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
