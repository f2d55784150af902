"""Counts, without a GPU, what decides a GPU's speed: bytes and kernels of the loss and of the compiled layers.

    python scripts/bench/kernel_counts.py [--chunk-tokens 1024] [--json rows.json]
    python scripts/bench/kernel_counts.py --list cuda      the kernels of the layers

The loss (loss_traffic.py): one default micro-batch at 151,936 words, forward and backward, with its own kernel and as
torch's operators. The layers: layers of Qwen3-0.6B's sizes are compiled, forward and backward, up to inductor's plan of
kernels; none is generated or run. Each planned kernel counts by the buffers that it reads and writes, each of them
once; products and attention are no kernels of inductor's. Planned for a GPU (an H100) they come from the same traced
graphs; on this machine's CPU a norm's statistics and its weight's gradient are kernels of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import loss_traffic
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
    vocab_size=128, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)  # fmt: skip
LAYERS = 28
TOKENS = {"encoder": 16_384, "decoder": 8_192}
"""Of the default micro-batch of 4 × (4,096 + 2,048)."""
H100 = {
    "multi_processor_count": 132, "major": 9, "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65_536, "warp_size": 32,
}  # fmt: skip


def planned(plan: str) -> list[dict[str, Any]]:
    """The kernels of an encoder and a decoder layer with the operators that they compute, and what each reads and
    writes in all layers of one micro-batch.
    """
    positions = {side: torch.arange(tokens) for side, tokens in TOKENS.items()}
    edges = [torch.tensor([0, tokens], dtype=torch.int32) for tokens in TOKENS.values()]
    layout = PackedLayout.build(*edges, *((tokens,) for tokens in TOKENS.values()), *positions.values())
    layout = dataclasses.replace(layout, kernel=AttentionKernel("as on a GPU", lambda _: "", attend_in_torch))
    states = {
        side: torch.empty(tokens, SIZES.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        for side, tokens in TOKENS.items()
    }
    layers = {
        "encoder": (Qwen3EncoderLayer(SIZES, 0), (states["encoder"],)),
        "decoder": (Qwen3DecoderLayer(SIZES, 0), (states["decoder"], states["encoder"])),
    }
    found: list[dict[str, Any]] = []
    for side, (layer, inputs) in layers.items():
        with _planning(plan, side, found), suppress(_Planned):
            rotary = rotary_tables(positions[side], SIZES, torch.bfloat16)
            compiled(layer.bfloat16().forward, random=False)(*inputs, rotary=rotary, layout=layout)
    return found


class _Planned(Exception):
    """Raised in place of running what was planned."""


@contextmanager
def _planning(plan: str, side: str, found: list[dict[str, Any]]) -> Iterator[None]:
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


def _kernels(graph: GraphLowering, side: str) -> Iterator[dict[str, Any]]:
    for node in graph.scheduler.nodes:
        if not any(part in type(node).__name__ for part in ("Extern", "Nop")):
            parts = [part.node for part in node.get_nodes() if part.node is not None]
            operators = {str(origin.target).split(".")[1] for part in parts for origin in part.origins}
            yield {
                "side": side,
                "direction": "backward" if graph.is_backward else "forward",
                "GB read": node.get_read_buffer_sizes() * LAYERS / 1e9,
                "GB written": node.get_write_buffer_sizes() * LAYERS / 1e9,
                "operators": " ".join(sorted(operators - {"view", "prims"})),
            }


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
    parser.add_argument("--chunk-tokens", type=int, default=loss_traffic.CHUNK_TOKENS, help="of the loss")
    parser.add_argument("--list", choices=("cuda", "cpu"), help="list the layers' kernels, as planned for it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.list:
        report(f"planned for {options.list}", planned(options.list), options.json)
        return
    rows = []
    for name, has_kernel in (("loss, its kernel", True), ("loss, torch's operators", False)):
        found = loss_traffic.counted(chunk_tokens=options.chunk_tokens, has_kernel=has_kernel)
        products = {"of them products": found.products, "GB of these": found.product_bytes / 1e9}
        rows.append(_row(name, found.num_bytes / 1e9, found.kernels) | products)
    for name, plan in (("layers, planned for a GPU", "cuda"), ("layers, planned for a CPU", "cpu")):
        kernels = planned(plan)
        gigabytes = sum(one["GB read"] + one["GB written"] for one in kernels)
        rows.append(_row(name, gigabytes, len(kernels) * LAYERS))
    report("counted without a GPU", rows, options.json)


def _row(name: str, gigabytes: float, kernels: int) -> dict[str, Any]:
    return {"what": name, "GB": gigabytes, "ms at 3 TB/s": gigabytes / 3, "kernels": kernels}


if __name__ == "__main__":
    main()
