"""Compiles layers of Qwen3-0.6B's sizes to machine code for an H100 that is not there, in a process of its own.

scripts/bench/kernel_counts.py has inductor plan the kernels for such a GPU; here they are generated, too, and Triton
compiles them: all but the launch. Names that ask a GPU something are replaced by a stand-in with an H100's numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source
from torch._inductor.graph import GraphLowering

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"
SHARED_MEMORY = 232_448
"""Bytes that a block of an H100 may have."""


def machine_code() -> list[list[int]]:
    """The bytes of code of each kernel, for each graph: encoder and decoder, forward and backward."""
    done = subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.PIPE, text=True)
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


class Driver:
    """Triton's, of a GPU that is not there."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY})

    def __getattr__(self, name: str) -> Any:
        from triton.backends.compiler import GPUTarget

        return lambda *_: GPUTarget("cuda", 90, 32) if name == "get_current_target" else 0

    @staticmethod
    def is_active() -> bool:
        return True


def pretend_a_driver() -> None:
    from triton.backends import backends
    from triton.runtime.driver import driver

    backends["nvidia"] = replace(backends["nvidia"], driver=Driver)
    del backends["amd"]
    driver.set_active(Driver())
    torch._C._cuda_getCurrentRawStream = lambda _: 0


@contextmanager
def compiling(_plan: str, _side: str, found: list[list[int]]) -> Iterator[None]:
    """Have torch.compile end at machine code; the sizes of each graph's kernels are added to `found`."""
    generate = GraphLowering.compile_to_module

    def stop(*_: Any) -> None:
        raise kernel_counts._Planned

    def compile_kernels(graph: GraphLowering) -> ModuleType:
        sources: dict[str, str] = {}
        with patch.object(AsyncCompile, "triton", lambda self, name, source, **_: sources.update({name: source})):
            generate(graph)
        kernels = [_load_triton_kernel_from_source(name, source) for name, source in sources.items()]
        for kernel in kernels:
            kernel.precompile(warm_cache_only=True)
        found.append([min(len(one.kernel.asm["cubin"]) for one in kernel.compile_results) for kernel in kernels])
        module = ModuleType("compiled")
        module.__dict__.update(call=stop, __file__="", key="")
        return module

    torch._dynamo.reset()
    with ExitStack() as patches:
        config = torch._inductor.config.patch(force_disable_caches=True, use_static_triton_launcher=False)
        patches.enter_context(config)
        patches.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        patches.enter_context(patch.object(GraphLowering, "compile_to_module", compile_kernels))
        patches.enter_context(patch.object(kernel_counts.precision, "_EMULATED_ON_CPU", frozenset()))
        kernel_counts._plan_for_a_gpu(patches)
        yield


if __name__ == "__main__":
    sys.path.append(str(SCRIPTS))
    import kernel_counts

    pretend_a_driver()
    kernel_counts._planning = compiling
    print(json.dumps(kernel_counts.planned("cuda")))
