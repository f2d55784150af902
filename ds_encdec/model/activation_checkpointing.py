"""Trading activation memory for computation (recompute) or for transfers (offload to host memory).

Layers are patched in place, on the instance's `forward`, so module and parameter names stay as they are and the hooks
of ZeRO-3 and FSDP2, which sit around `forward`, keep working. Checkpointing is torch's non-reentrant one; losses and
gradients are bit-identical in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_encdec.model.modeling import Qwen3DecoderLayer, Qwen3EncoderLayer, Qwen3ForSeq2SeqLM

Mode = Literal["none", "full", "every_n"]
Forward = Callable[..., Tensor]


def apply_activation_checkpointing(
    model: Qwen3ForSeq2SeqLM, mode: Mode, *, every_n: int = 2, offload: bool = False
) -> None:
    """Make layers recompute their activations in the backward pass, or keep them in host memory, or both.

    `full`: every layer recomputes; `every_n`: of either stack the layers 0, n, 2n, …; `none`: no layer. `offload`: what
    layers save for the backward pass (with recomputation only their input) lives in host memory until then. Apply once,
    before the model is wrapped by an engine.
    """
    interval = {"none": 0, "full": 1, "every_n": every_n}[mode]
    for stack in (model.encoder.layers, model.decoder.layers):
        for index, layer in enumerate(stack):
            assert isinstance(layer, (Qwen3EncoderLayer, Qwen3DecoderLayer))
            forward: Forward = layer.forward
            if interval and index % interval == 0:
                forward = _recomputing(forward)
            if offload:
                forward = _offloading(forward, layer)
            layer.forward = forward  # type: ignore[method-assign]


def _recomputing(forward: Forward) -> Forward:
    """The layer, remembering only `hidden_states`; what else it reads (encoder output, rotary tables) lives anyway."""

    def recomputing_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        def run(hidden_states: Tensor) -> Tensor:
            return forward(hidden_states, *shared, **options)

        # The model draws no random numbers, so there is no generator state to save and restore.
        return checkpoint(run, hidden_states, use_reentrant=False, preserve_rng_state=False)

    return recomputing_forward


def _offloading(forward: Forward, layer: nn.Module) -> Forward:
    """The layer, with what autograd saves inside it copied to host memory and back when the backward pass needs it.

    Parameters stay where they are, and so does what all layers share (the encoder's output, rotary tables): copying
    those would cost memory instead of sparing it.
    """

    def offloading_forward(hidden_states: Tensor, *shared: Any, **options: Any) -> Tensor:
        kept = [*shared, *options.get("rotary", ())]

        def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
            if tensor.numel() == 0 or _shares_memory(tensor, [*kept, *layer.parameters()]):
                return None, tensor
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, host.copy_(tensor, non_blocking=tensor.is_cuda)

        def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor if device is None else tensor.to(device, non_blocking=True)

        with saved_tensors_hooks(pack, unpack):
            return forward(hidden_states, *shared, **options)

    return offloading_forward


def _shares_memory(tensor: Tensor, others: list[Any]) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(isinstance(other, Tensor) and other.untyped_storage().data_ptr() == address for other in others)
