"""The packed form: documents see only themselves, and the ordinary form gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import Packed, pack, tiny_model
from torch import Tensor
from torch.distributed.fsdp import _common_utils
from torch.nn import functional as F

from ds_encdec.model.attention import PackedLayout, PaddedLayout
from ds_encdec.model.attention_kernels import KERNELS, AttentionKernel, KernelQuery, attend_by_document, why_not
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

LENGTHS = ((5, 0, 7), (4, 6, 3), 16, 17)  # encoder and decoder documents, sizes of the two buffers


@pytest.fixture(params=[{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}], ids=["gqa", "untied", "mha"])
def model(request: pytest.FixtureRequest) -> Qwen3ForSeq2SeqLM:
    return tiny_model(**request.param)


def token_losses_alone(model: Qwen3ForSeq2SeqLM, batch: Packed) -> Tensor:
    """Each document by itself through the ordinary form; the losses by torch's own cross-entropy."""
    losses = []
    for encoder_ids, decoder_ids, labels in batch.documents:
        logits = model(input_ids=encoder_ids[None], decoder_input_ids=decoder_ids[None]).logits[0]
        losses.append(F.cross_entropy(logits.float(), labels, reduction="none"))
    return torch.cat(losses)


def gradients(model: Qwen3ForSeq2SeqLM) -> dict[str, Tensor]:
    taken = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return taken


def test_losses_and_gradients_packed_equal_those_alone(model: Qwen3ForSeq2SeqLM) -> None:
    batch = pack(*LENGTHS)
    alone = token_losses_alone(model, batch)
    alone.sum().backward()
    expected = gradients(model)
    packed = model(**batch.inputs)
    torch.testing.assert_close(packed.token_losses[: len(alone)], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.loss, alone.sum(), rtol=1e-6, atol=1e-5)
    assert packed.loss.dtype == packed.token_losses.dtype == torch.float32
    assert not packed.token_losses.requires_grad
    assert (packed.token_losses[len(alone) :] == 0).all()
    packed.loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_documents_are_isolated(model: Qwen3ForSeq2SeqLM) -> None:
    batch = pack(*LENGTHS)
    before = model(**batch.inputs).token_losses
    batch.inputs["input_ids"][:5] = 3  # the encoder side of the first document
    batch.inputs["input_ids"][12:] = 4  # padding
    batch.inputs["decoder_input_ids"][10:13] = 5  # the decoder side of the third document
    after = model(**batch.inputs).token_losses
    assert torch.equal(after[4:10], before[4:10])
    assert not torch.isclose(after[:4], before[:4]).all()
    assert not torch.isclose(after[10:13], before[10:13]).all()


def test_decoder_is_causal_and_encoder_is_not(model: Qwen3ForSeq2SeqLM) -> None:
    batch = pack((6,), (5,), 6, 5)
    before = model(**batch.inputs).token_losses
    batch.inputs["decoder_input_ids"][3] = 2
    changed = model(**batch.inputs).token_losses
    assert torch.equal(changed[:3], before[:3])
    assert changed[3] != before[3]
    batch.inputs["input_ids"][5] = 2  # the last encoder token reaches the first target
    assert model(**batch.inputs).token_losses[0] != changed[0]


@pytest.mark.parametrize("lengths", [((), (), 9, 8), ((0, 0), (3, 4), 9, 8), ((4, 5), (3, 5), 9, 8)])
def test_every_parameter_gets_a_gradient(model: Qwen3ForSeq2SeqLM, lengths: tuple[Any, ...]) -> None:
    """Also with no document at all, or no encoder token: under ZeRO-3 every rank reduces the same gradients."""
    output = model(**pack(*lengths).inputs)
    output.loss.backward()
    taken = gradients(model)
    assert all(torch.isfinite(gradient).all() for gradient in taken.values())
    if not lengths[0]:
        assert output.loss == 0
        assert all((gradient == 0).all() for gradient in taken.values())


@pytest.mark.parametrize("lengths", [((5, 0, 7), (4, 6, 3), 16, 17), ((), (), 4, 3), ((2, 2), (1, 3), 4, 4)])
def test_merge_index_is_a_permutation_in_document_order(lengths: tuple[Any, ...]) -> None:
    layout = pack(*lengths).inputs["packing"]
    encoder_lengths, decoder_lengths, encoder_tokens, decoder_tokens = lengths
    expected, encoder_start, decoder_start = [], 0, encoder_tokens
    for encoder_length, decoder_length in zip(encoder_lengths, decoder_lengths, strict=True):
        expected += range(encoder_start, encoder_start + encoder_length)
        expected += range(decoder_start, decoder_start + decoder_length)
        encoder_start += encoder_length
        decoder_start += decoder_length
    expected += [*range(encoder_start, encoder_tokens), *range(decoder_start, encoder_tokens + decoder_tokens)]
    assert layout.merge_index.tolist() == expected
    assert layout.split_index.tolist() == [expected.index(row) for row in range(len(expected))]
    assert layout.merged.key_cu_seqlens[-1] == encoder_tokens + decoder_tokens


def test_layout_refuses_documents_that_do_not_fit() -> None:
    boundaries, positions = torch.tensor([0, 5, 9], dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ValueError, match="9 and 9 tokens do not fit into buffers of 8 and 8 tokens"):
        PackedLayout.build(boundaries, boundaries, (5, 4), (5, 4), positions, positions)


@pytest.mark.parametrize("lengths", [LENGTHS, ((), (), 16, 17)], ids=["documents", "padding alone"])
def test_padding_has_no_part_in_any_gradient(lengths: tuple[Any, ...]) -> None:
    """What stands there decides its own states, and nothing else."""
    model, found = tiny_model(), []
    for token in (3, 5):
        batch = pack(*lengths)
        batch.inputs["input_ids"][sum(lengths[0]) :] = token
        batch.inputs["decoder_input_ids"][sum(lengths[1]) :] = token
        model(**batch.inputs).loss.backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_merged_attention_as_bottom_right_causal_equals_the_masked_form() -> None:
    """One document: keys [encoder ; decoder] and a bottom-right aligned causal mask, against an explicit mask."""
    batch = pack((6,), (5,), 6, 5)
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    encoder_k, encoder_v = torch.randn(2, 6, 2, 8)
    layout = batch.inputs["packing"]
    packed = layout.attend_merged(q, layout.merged_rows(encoder_k, k), layout.merged_rows(encoder_v, v))
    padded = PaddedLayout.build(encoder_length=6, decoder_length=5, device=q.device)
    merged_k, merged_v = padded.merged_rows(encoder_k[None], k[None]), padded.merged_rows(encoder_v[None], v[None])
    masked = padded.attend_merged(q[None], merged_k, merged_v)[0]
    torch.testing.assert_close(packed, masked, rtol=1e-5, atol=1e-6)


def test_bfloat16_follows_float32() -> None:
    """bfloat16 keeps 8 bits: losses within 2 %, no worse than rounding the weights explains."""
    batch = pack(*LENGTHS)
    exact = tiny_model()(**batch.inputs).loss
    rounded = tiny_model().bfloat16()(**batch.inputs).loss
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=0)


@pytest.mark.skipif(not hasattr(_common_utils, "collect_grad_tensors"), reason="this torch's FSDP2 looks less deep")
def test_what_fsdp2_looks_through_does_not_grow_with_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """It searches the arguments of every layer for tensors with gradients, twice a pass."""
    seen: list[object] = []
    is_tensor = torch.is_tensor
    monkeypatch.setattr(torch, "is_tensor", lambda one: seen.append(one) or is_tensor(one))
    counts = []
    for documents in (1, 20):
        layout = pack((8,) * documents, (4,) * documents, 256, 128, 20).inputs["packing"]
        seen.clear()
        _common_utils.collect_grad_tensors(layout)
        counts.append(len(seen))
    assert 0 < counts[0] == counts[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash kernels need CUDA")
@pytest.mark.parametrize("side", ["encoder", "merged"])
@pytest.mark.parametrize("kernel", reversed(KERNELS), ids=lambda kernel: kernel.name)  # FlashAttention 3 stays active
def test_kernels_of_gpus_equal_attention_by_document(kernel: AttentionKernel, side: str) -> None:
    if refusal := why_not(kernel, KernelQuery(torch.device("cuda", 0), torch.bfloat16, 64)):
        pytest.skip(f"{kernel.name}: {refusal}")
    segments = getattr(pack((70, 0, 133), (40, 61, 7), 256, 128).inputs["packing"], side)
    segments.query_cu_seqlens = segments.query_cu_seqlens.cuda()
    segments.key_cu_seqlens = segments.key_cu_seqlens.cuda()
    queries, keys = (256, 256) if side == "encoder" else (128, 384)
    causal = side == "merged"
    results = []
    for attend in (kernel.attend, attend_by_document):
        torch.manual_seed(0)
        q = torch.randn(queries, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(keys, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        v = torch.randn(keys, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        documents = sum(segments.query_lengths)
        out = attend(q, k, v, segments, causal, 0.0)[:documents]
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for flash, plain in zip(*results, strict=True):
        torch.testing.assert_close(flash, plain, rtol=2e-2, atol=2e-2)
