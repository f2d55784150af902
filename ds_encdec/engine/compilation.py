"""The decision whether layers run through torch.compile: what is asked for is tried out before it is relied on."""

import logging
from collections import Counter
from dataclasses import replace

import torch

from ds_encdec.config.rules import engine_conflicts, find_conflicts
from ds_encdec.config.schema import FullConfig
from ds_encdec.engine.regularization import prepare_for_training
from ds_encdec.engine.sharded_engine import compute_dtype, empty_model
from ds_encdec.launch.host_collectives import HostCollectives, RunContext
from ds_encdec.model.attention import PackedLayout
from ds_encdec.model.attention_kernels import Wanted, choose_kernel
from ds_encdec.model.compiled_layers import uncompiled
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.lora import choose_trained
from ds_encdec.model.precision import kernels_taken
from ds_encdec.types import ConfigError

logger = logging.getLogger(__name__)

_FIELD = "training.torch_compile"
_TOKENS = 8
_failures: dict[tuple[str, ...], str] = {}
"""Why layers cannot be compiled, by all that decides it; "" where they can. A search for a batch size asks often."""


def with_compilation_decided(config: FullConfig, context: RunContext, model_config: Qwen3Seq2SeqConfig) -> FullConfig:
    """`config` with true or false in place of `training.torch_compile: auto`, the same on all ranks. Collective.

    `auto` is true on GPUs for what an engine can compile, but not for ZeRO-3, whose layers are compiled between its
    hooks: that has run on CPUs alone. A tiny layer of each kind is then compiled and runs forward
    and backward: where that fails, on any rank, `auto` is false, with a warning. Raises ConfigError where it was true.
    """
    asked = config.training.torch_compile
    compiled = _with(config, True)
    by_hooks = context.engine_spec.gathers_by_hooks and config.infra.sharding_stage.startswith("zero3")
    if asked == "auto" and (context.device.type != "cuda" or by_hooks or _conflicts(compiled, context)):
        return _with(config, False)
    if not asked:
        return config
    failures = context.collectives.gather(_failure(compiled, context.device, model_config))
    rank, failure = next(((rank, failure) for rank, failure in enumerate(failures) if failure), (0, ""))
    if failure and asked != "auto":
        raise ConfigError(f"{_FIELD}=true: layers cannot be compiled on rank {rank}: {failure}. Set it to false")
    if failure and context.world.is_main:
        logger.warning("%s=auto: layers run as they are, compiling them fails on rank %d: %s", _FIELD, rank, failure)
    if not failure and context.world.is_main:
        logger.info("the first step and the first evaluation compile the layers, which takes up to some minutes")
    if not failure and asked == "auto":  # real layers that fail all the same run as they are, with torch's warning
        context.undo.enter_context(torch._dynamo.config.patch(suppress_errors=True))
    return _with(config, not failure)


def warn_of_ranks_that_differ(collectives: HostCollectives) -> None:
    """Warn, after a first step, of ranks whose layers were to be compiled and were not, or that took other kernels.

    Collective. Layers that stop being compiled later are in torch's own warning alone, on their rank.
    """
    found = dict(kernels_taken) | ({"each layer": "torch's operators, uncompiled"} if uncompiled else {})
    uncompiled.clear()
    ranks = collectives.gather_to_zero(found)
    lines = []
    for part in dict.fromkeys(part for taken in ranks for part in taken):
        by_rank = [taken.get(part, "compiled code" if part == "each layer" else "nothing yet") for taken in ranks]
        (usual, _), *others = Counter(by_rank).most_common()
        if part == "each layer" and not others:
            lines.append(f"{part} in {usual} on all")
        for other, _ in others:
            where = ", ".join(str(rank) for rank, kernel in enumerate(by_rank) if kernel == other)
            lines.append(f"{part} in {other} on rank {where}, elsewhere in {usual}")
    if lines:
        logger.warning(
            "Parts of the model do not run in what was planned on all %d ranks, and all wait for the slowest: %s. The "
            "log of a rank that differs says why its trial or compiler failed; its memory is not what was estimated",
            len(ranks),
            "; ".join(lines),
        )


def _with(config: FullConfig, compile_layers: bool) -> FullConfig:
    return config.model_copy(update={"training": config.training.model_copy(update={"torch_compile": compile_layers})})


def _conflicts(config: FullConfig, context: RunContext) -> bool:
    """Return whether `config` asks for something that excludes compiled layers, or its engine does."""
    found = [*find_conflicts(config), *engine_conflicts(config, context.engine)]
    return any(_FIELD in conflict.fields for conflict in found)


def _failure(config: FullConfig, device: torch.device, model_config: Qwen3Seq2SeqConfig) -> str:
    """Say why layers cannot be compiled on `device`; "" where they can."""
    heads, key_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    tiny = Qwen3Seq2SeqConfig(
        vocab_size=_TOKENS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads // key_heads,
        num_key_value_heads=1,
        head_dim=model_config.head_dim,
        use_flash_attention=model_config.use_flash_attention,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    settings = config.training.model_dump_json(), config.model.model_dump_json()
    key = (str(device), tiny.to_json_string(), *settings)
    if key not in _failures:
        try:
            with torch._dynamo.config.patch(suppress_errors=False):
                _run_tiny_layers(config, device, tiny)
            _failures[key] = ""
        except Exception as error:
            logger.debug("compiling layers:", exc_info=True)
            _failures[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            torch.compiler.reset()  # else the sizes of the real layers would be second ones, and variables
    return _failures[key]


def _run_tiny_layers(config: FullConfig, device: torch.device, tiny: Qwen3Seq2SeqConfig) -> None:
    """Run an encoder and a decoder layer, prepared as `config` says, forward and backward over one document."""
    dtype = compute_dtype(config.training)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), torch.enable_grad():
        model = empty_model(tiny, dtype, device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        choose_trained(model, config)
        prepare_for_training(model.train(), config)
        edges = torch.tensor([0, *[_TOKENS] * 8], dtype=torch.int32, device=device)
        positions = torch.arange(_TOKENS, device=device)
        layout = PackedLayout.build(edges, edges, (_TOKENS,), (_TOKENS,), positions, positions)
        dropout = config.training.attention_dropout
        choice = choose_kernel(Wanted(device, dtype, tiny.head_dim, dropout), flash=tiny.use_flash_attention)
        layout = replace(layout, kernel=choice.kernel, dropout=dropout)
        states = torch.randn(_TOKENS, tiny.hidden_size, device=device, dtype=dtype, requires_grad=True)
        out = model.decoder(states, model.encoder(states, layout=layout), layout=layout)
        out.float().square().sum().backward()
        assert states.grad is not None
        if not torch.isfinite(states.grad).all():
            raise FloatingPointError("gradients are not finite")
