"""Compiles layers of a shipped size for a GPU of compute capability 9.0 that is not there, in a process of its own.

The layers run on the CPU, where their graphs are captured. The tensors of the graphs are then said to lie on a GPU, and
inductor and Triton make of them what they would make there, down to machine code: all but the launch. Names of torch
and Triton that ask a GPU something are replaced by a stand-in with an H100's numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config
import torch._inductor.scheduler
import torch._subclasses.fake_tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.regularization import prepare_for_training
from ds_encdec.engine.sharded_engine import empty_model
from ds_encdec.memory.job import PUBLISHED
from ds_encdec.model import precision
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig

GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    gcnArchName="",
)

Graph = tuple[torch.fx.GraphModule, list[Any], bool, dict[str, Any]]
"""The graph, its inputs, whether it is a backward pass, and inductor's options for it."""


def machine_code(name: str) -> list[list[int]]:
    """Compile layers of `PUBLISHED[name]` in a process of its own; return for each graph its kernels' bytes of code."""
    done = subprocess.run([sys.executable, __file__, name], check=True, stdout=subprocess.PIPE, text=True)
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def captured_graphs(name: str) -> list[Graph]:
    """The graphs of an encoder and a decoder layer, forward and backward, as training captures them on the CPU."""
    graphs: list[Graph] = []

    def captures(is_backward: bool, options: dict[str, Any]) -> Callable[..., Any]:
        def capture(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append((graph, inputs, is_backward, options))
            return make_boxed_func(graph.forward)

        return capture

    compile_by = torch.compile

    def compile_to_capture(forward: Callable[..., Any], options: dict[str, Any]) -> Any:
        backend = aot_autograd(
            fw_compiler=captures(False, options),
            bw_compiler=captures(True, options),
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_by(forward, backend=backend)

    torch.compile = compile_to_capture
    precision._EMULATED_ON_CPU = frozenset()  # a GPU has no float32 copies of the weights
    published = PUBLISHED[name]
    sizes = Qwen3Seq2SeqConfig(
        vocab_size=8,
        hidden_size=published.hidden_size,
        intermediate_size=published.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=published.num_attention_heads,
        num_key_value_heads=published.num_key_value_heads,
        head_dim=published.head_dim,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    config = FullConfig.model_validate({"training": {"torch_compile": True, "bf16": True}})
    run_layers(config, sizes)
    torch.compile = compile_by
    return graphs


def run_layers(config: FullConfig, sizes: Qwen3Seq2SeqConfig, tokens: int = 8) -> None:
    """Run an encoder and a decoder layer forward and backward over one document, on the CPU."""
    sys.path.append(str(Path(__file__).parents[1]))
    from flash_on_cpus import IN_TORCH, flash_on_cpus

    model = empty_model(sizes, torch.bfloat16, torch.device("cpu")).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    prepare_for_training(model, config)
    edges, positions = torch.tensor([0, *[tokens] * 8], dtype=torch.int32), torch.arange(tokens)
    layout = replace(PackedLayout.build(edges, edges, (tokens,), (tokens,), positions, positions), kernel=IN_TORCH)
    states = torch.randn(tokens, sizes.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with flash_on_cpus():
        model.decoder(states, model.encoder(states, layout=layout), layout=layout).float().square().sum().backward()


class Driver:
    """Triton's, of a GPU that is not there."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": H100.shared_memory_per_block_optin})

    def __getattr__(self, name: str) -> Any:
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size)
        return lambda *_: target if name == "get_current_target" else 0

    @staticmethod
    def is_active() -> bool:
        return True


def pretend_a_gpu() -> None:
    from triton.backends import backends
    from triton.runtime.driver import driver

    backends["nvidia"] = replace(backends["nvidia"], driver=Driver)
    del backends["amd"]
    driver.set_active(Driver())
    torch._inductor.scheduler.has_triton = lambda: True
    torch._subclasses.fake_tensor.init_gpu_context = lambda _: None
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
        for name, answer in {
            "get_device_properties": H100,
            "get_device_capability": (H100.major, H100.minor),
            "get_compute_capability": 10 * H100.major + H100.minor,
            "current_device": 0,
            "device_count": 1,
            "is_available": True,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": None,
            "synchronize": None,
            "device": nullcontext(),
        }.items():
            if hasattr(owner, name):
                setattr(owner, name, staticmethod(lambda *_, answer=answer: answer))


def compiled_kernels(graph: torch.fx.GraphModule, inputs: list[Any], is_backward: bool, options: Any) -> list[int]:
    """The bytes of machine code of each kernel that inductor writes for the graph."""
    sources: list[tuple[str, str]] = []
    AsyncCompile.triton = lambda self, name, source, **_: sources.append((name, source))
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
    graph.recompile()
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    there = [on_gpu(value) if isinstance(value, FakeTensor) else value for value in inputs]
    with tracing(TracingContext(mode)), torch._inductor.config.patch(options):
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
        compile_fx_inner(graph, there, is_backward=is_backward)
    kernels = [_load_triton_kernel_from_source(name, source) for name, source in sources]
    for kernel in kernels:
        kernel.precompile(warm_cache_only=True)
    return [min(len(result.kernel.asm["cubin"]) for result in kernel.compile_results) for kernel in kernels]


def on_gpu(value: FakeTensor) -> FakeTensor:
    there = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, there, GPU)


if __name__ == "__main__":
    found = captured_graphs(sys.argv[1])
    pretend_a_gpu()
    with torch._inductor.config.patch(force_disable_caches=True, use_static_triton_launcher=False):
        print(json.dumps([compiled_kernels(*graph) for graph in found]))
