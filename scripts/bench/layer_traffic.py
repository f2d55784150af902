"""Counts what the compiled layers of one micro-batch move on a GPU beside products and attention, without a GPU.

    python scripts/bench/layer_traffic.py [--plan cuda|cpu] [--json rows.json]

Layers of Qwen3-0.6B's sizes are compiled, forward and backward, up to inductor's plan of kernels; none is generated or
run. Each planned kernel counts by the buffers that it reads and writes, each of them once; products and attention are
no kernels of inductor's. --plan cuda has it plan as for an H100, from the same traced graphs; --plan cpu as for this
machine, where a norm's statistics and its weight's gradient are kernels of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch._functorch.config
from torch import Tensor
from torch._inductor import compile_fx, scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from turns import report

from ds_encdec.model import precision
from ds_encdec.model.activation_checkpointing import compiled
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.attention_kernels import AttentionKernel, attend_in_torch
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.encoder import Qwen3EncoderLayer, rotary_tables
from ds_encdec.model.modeling import Qwen3DecoderLayer

SIZES = Qwen3Seq2SeqConfig(
    vocab_size=128,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)
LAYERS = 28
TOKENS = {"encoder": 16_384, "decoder": 8_192}
"""Of the default micro-batch of 4 × (4,096 + 2,048)."""
H100 = {
    "multi_processor_count": 132,
    "major": 9,
    "max_threads_per_block": 1024,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65_536,
    "warp_size": 32,
}

Plan = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a plan: bytes that it reads and writes in all layers of its side, and operators that it computes."""

    side: str
    direction: str
    reads: int
    writes: int
    operators: str

    @property
    def num_bytes(self) -> int:
        """Read and written."""
        return self.reads + self.writes


def planned(plan: Plan, sizes: Qwen3Seq2SeqConfig = SIZES) -> list[Kernel]:
    """The kernels of an encoder and a decoder layer, each counted for all layers of one micro-batch."""
    positions = {side: torch.arange(tokens) for side, tokens in TOKENS.items()}
    edges = [torch.tensor([0, tokens], dtype=torch.int32) for tokens in TOKENS.values()]
    layout = PackedLayout.build(*edges, *((tokens,) for tokens in TOKENS.values()), *positions.values())
    layout = dataclasses.replace(layout, kernel=AttentionKernel("as on a GPU", lambda _: "", attend_in_torch))
    states = {
        side: torch.empty(tokens, sizes.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        for side, tokens in TOKENS.items()
    }
    layers = {
        "encoder": (Qwen3EncoderLayer(sizes, 0), (states["encoder"],)),
        "decoder": (Qwen3DecoderLayer(sizes, 0), (states["decoder"], states["encoder"])),
    }
    found: list[Kernel] = []
    for side, (layer, inputs) in layers.items():
        with _planning(plan, side, found), suppress(_Planned):
            rotary = rotary_tables(positions[side], sizes, torch.bfloat16)
            compiled(layer.bfloat16().forward, random=False)(*inputs, rotary=rotary, layout=layout)
    return found


class _Planned(Exception):
    """Raised in place of running what was planned."""


@contextmanager
def _planning(plan: Plan, side: str, found: list[Kernel]) -> Iterator[None]:
    """Have torch.compile end at its plans, forward and backward, whose kernels are added to `found`."""

    def stop(*_: Any) -> None:
        raise _Planned

    def plan_kernels(graph: GraphLowering) -> ModuleType:
        graph.init_wrapper_code()
        graph._update_scheduler()
        found.extend(_kernels(graph, side))
        module = ModuleType("planned")
        module.__dict__.update(call=stop, __file__="", key="")
        return module

    torch._dynamo.reset()
    with ExitStack() as patches:
        patches.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        patches.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        patches.enter_context(patch.object(GraphLowering, "compile_to_module", plan_kernels))
        patches.enter_context(patch.object(precision, "_EMULATED_ON_CPU", frozenset()))
        if plan == "cuda":
            _plan_for_a_gpu(patches)
        yield
    torch._dynamo.reset()


def _kernels(graph: GraphLowering, side: str) -> Iterator[Kernel]:
    for node in graph.scheduler.nodes:
        if not any(part in type(node).__name__ for part in ("Extern", "Nop")):
            parts = [part.node for part in node.get_nodes() if part.node is not None]
            operators = {str(origin.target).split(".")[1] for part in parts for origin in part.origins}
            moved = node.get_read_buffer_sizes() * LAYERS, node.get_write_buffer_sizes() * LAYERS
            direction = "backward" if graph.is_backward else "forward"
            yield Kernel(side, direction, *moved, " ".join(sorted(operators - {"view", "prims"})))


def _plan_for_a_gpu(patches: ExitStack) -> None:
    """Have inductor take the tensors of graphs that were traced on the CPU for tensors of an H100."""
    gpu = torch.device("cuda", 0)
    properties = SimpleNamespace(**H100, minor=0, total_memory=80 << 30, name="H100", gcnArchName="")
    hints = DeviceProperties(type="cuda", index=0, cc=90, **H100)
    interface = torch._dynamo.device_interface.CudaInterface
    lower = compile_fx._InProcessFxCompile.codegen_and_compile

    def moved(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(moved, value))
        if not isinstance(value, Tensor) or not value.dim() or not value.numel():
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=gpu)

    def lower_for_gpu(self: Any, graph: Any, inputs: Any, *rest: Any) -> Any:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        with next(value.fake_mode for value in values if isinstance(value, torch._subclasses.FakeTensor)):
            for node, value in zip(graph.graph.nodes, values, strict=True):
                if node.kwargs.get("device") is not None:
                    node.kwargs = {**node.kwargs, "device": gpu}
                if value is not None:
                    node.meta["val"] = moved(value)
            on_gpu = [moved(one) for one in inputs]
        return lower(self, graph, on_gpu, *rest)

    for owner, name, value in (
        (compile_fx._InProcessFxCompile, "codegen_and_compile", lower_for_gpu),
        (compile_fx, "_check_triton_bf16_support", lambda *_: None),
        (scheduler, "has_triton", lambda *_: True),
        (DeviceProperties, "create", lambda *_: hints),
        (interface, "get_device_properties", lambda *_: properties),
        (interface.Worker, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "device_count", lambda: 1),
    ):
        patches.enter_context(patch.object(owner, name, value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kernels = planned(options.plan)
    rows = [
        {
            "side": kernel.side,
            "direction": kernel.direction,
            "GB read": kernel.reads / 1e9,
            "GB written": kernel.writes / 1e9,
            "operators": kernel.operators,
        }
        for kernel in kernels
    ]
    report(f"planned for {options.plan}: {sum(one.num_bytes for one in kernels) / 1e9:.1f} GB", rows, options.json)


if __name__ == "__main__":
    main()
