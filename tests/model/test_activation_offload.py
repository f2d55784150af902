"""Activations on the host: the order of copies, on a stand-in for a GPU's streams that copies as late as it may."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from tiny_models import pack, tiny_model
from torch import Tensor, nn

from ds_encdec.model.activation_checkpointing import ActivationOffload, Streams, _pack, _Record, _tensors
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM


class LateStreams(Streams):
    def __init__(self) -> None:
        self.layers_on_their_way = 1
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def run(self, copy: Callable[[], None]) -> int:
        self.queue.append(copy)
        return len(self.queue)

    def wait(self, copied: int) -> None:
        for copy in self.queue[self.done : copied]:
            copy()
        self.done = max(self.done, copied)


def offloading(model: Qwen3ForSeq2SeqLM, streams: LateStreams | None = None) -> ActivationOffload:
    offload = ActivationOffload((lambda device: streams) if streams else Streams)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.forward = offload.around(layer.forward, layer)  # type: ignore[method-assign]
    return offload


def gradients(model: Qwen3ForSeq2SeqLM) -> dict[str, Tensor]:
    model.train()
    for sizes in (((5, 0, 7), (4, 6, 3)), ((8, 2, 6), (1, 9, 2))):
        model(**pack(*sizes, 16, 17).inputs).loss.backward()
        with torch.no_grad():
            model(**pack((3, 4, 2), (4, 6, 3), 16, 17).inputs)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_every_copy_is_waited_for() -> None:
    expected, streams = gradients(tiny_model(num_hidden_layers=3)), LateStreams()
    model = tiny_model(num_hidden_layers=3)
    offload = offloading(model, streams)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    # Six layers to the host, all but the last two back, twice.
    assert len(streams.queue) == 2 * (6 + 4)
    assert not offload._leaving


def test_a_layer_comes_back_while_the_one_behind_it_is_gone_through() -> None:
    model, streams = tiny_model(num_hidden_layers=2).train(), LateStreams()
    offloading(model, streams)
    loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss
    left = len(streams.queue)
    assert left == 4
    waited: list[tuple[int, int]] = []
    wait = streams.wait

    def noted(copied: int) -> None:
        waited.append((copied - left, len(streams.queue) - left))
        wait(copied)

    streams.wait = noted  # type: ignore[method-assign]
    loss.backward()
    # The last two are still there. Each other one has been asked for before the one behind it was gone through.
    assert waited == [(0, 0), (-1, 0), (1, 1), (2, 2)]
    assert len(streams.queue) == left + 2


@pytest.mark.parametrize("late", [False, True])
def test_two_layers_are_on_the_device_at_most(late: bool) -> None:
    model = tiny_model(num_hidden_layers=3).train()
    offload = offloading(model, LateStreams() if late else None)
    records = []
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.register_forward_hook(lambda *_: records.append(offload._last()))
    loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss
    assert None not in records
    kept = [record for record in records if any(one.tensor is not None for one in record.saved.values())]
    assert len(kept) == 2 * late
    del loss


def test_what_all_layers_share_stays_and_nothing_is_copied_twice() -> None:
    model = tiny_model(num_hidden_layers=1).train()
    offload = offloading(model, LateStreams())
    batch = pack((5, 0, 7), (4, 6, 3), 16, 17).inputs
    loss = model(**batch).loss
    record = offload._leaving[-1]
    kept = [one.tensor for one in record.saved.values() if one.tensor is not None]
    layout = batch["packing"]
    shared = {
        tensor.untyped_storage().data_ptr()
        for tensor in (
            *vars(layout).values(),
            *vars(layout.encoder).values(),
            *vars(layout.merged).values(),
            *model.parameters(),
        )
        if isinstance(tensor, Tensor)
    }
    assert not shared & {tensor.untyped_storage().data_ptr() for tensor in kept}
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*_tensors(batch), *model.parameters())}
    assert shared <= seen  # boundaries, too, which kernels of GPUs save
    places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in kept]
    assert len(places) == len(set(places)) > 3
    assert max(one.uses for one in record.saved.values()) >= 3  # the input of the projections
    del loss


def test_what_was_saved_goes_with_its_graph_without_a_collector() -> None:
    model = tiny_model(num_hidden_layers=2).train()
    offload = offloading(model)
    gc.disable()
    try:
        loss = model(**pack((5, 0, 7), (4, 6, 3), 16, 17).inputs).loss
        last = offload._last
        assert last() is not None
        loss.backward()
        del loss
        assert last() is None
    finally:
        gc.enable()


def test_what_a_copy_would_lay_out_anew_stays() -> None:
    table = torch.randn(4, 6)
    laid_out = (table, table.T, table[1:])
    assert all(isinstance(_pack(_Record(lambda: None), set(), nn.Identity(), one), tuple) for one in laid_out)
    for one in (table[:, ::2], table[:1].expand(4, 6)):
        assert _pack(_Record(lambda: None), set(), nn.Identity(), one) is one
