"""Generate for many inputs, in batches of similar length, by the model's own `generate()` with its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ds_encdec.config.generation import GenerationSettings
from ds_encdec.data.randomness import keyed_generator

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
    from transformers.generation.streamers import BaseStreamer

TokenIds = Sequence[int] | np.ndarray


def plan_batches(encoder_ids: Sequence[TokenIds], settings: GenerationSettings) -> list[list[int]]:
    """Divide the inputs into batches of similar length, each a list of their numbers, the longest first. Nothing but
    the lengths and the settings counts, so that ranks and later runs divide them alike."""
    order = sorted(range(len(encoder_ids)), key=lambda number: -len(encoder_ids[number]))
    batches: list[list[int]] = []
    for number in order:
        longest = len(encoder_ids[batches[-1][0]]) if batches else 0
        row = (longest + settings.max_new_tokens) * settings.num_beams
        if batches and (len(batches[-1]) + 1) * row <= settings.batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def generate(
    model: PreTrainedModel,
    encoder_ids: Sequence[TokenIds],
    settings: GenerationSettings,
    stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return the tokens that `model` generates for each input, in their order, without start and end tokens.

    Greedy and beam search give each input the same text alone and in any batch, but for ties within rounding. So does
    sampling, with random numbers keyed by (seed, the input's number). In bfloat16 and float16 rounding is coarse, and
    other batches (another `batch_tokens`, other inputs) may give another text. `stopped` is called before each batch:
    once it returns True, nothing is generated for the rest.
    """
    generated: list[list[int]] = [[] for _ in encoder_ids]
    for batch in plan_batches(encoder_ids, settings):
        if stopped():
            break
        for number, ids in zip(batch, generate_batch(model, encoder_ids, batch, settings), strict=True):
            generated[number] = ids
    return generated


@torch.no_grad()
def generate_batch(
    model: PreTrainedModel,
    encoder_ids: Sequence[TokenIds],
    numbers: Sequence[int],
    settings: GenerationSettings,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """Generate for the inputs `numbers` as one batch; see `generate`. `streamer` receives each token of a single
    row."""
    if not settings.max_new_tokens:
        return [[] for _ in numbers]
    config = _generation_config(model, settings)
    ids, mask = padded([encoder_ids[number] for number in numbers], pad_id_of(config), model.device)
    with evaluating(model):
        rows = model.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=_sampling(settings, numbers),
            streamer=streamer,
        )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [_before(row[1:], ends) for row in rows.tolist()]


def text_of(tokenizer: PreTrainedTokenizerFast, ids: TokenIds) -> str:
    """Return the text of tokens, without those that begin, end and fill sequences. Sentinels stay."""
    names = ("bos", "eos", "pad", "cls", "sep")
    marks = {getattr(tokenizer, f"{name}_token_id") for name in names}
    shown = [int(token) for token in ids if token not in marks]
    return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the ids that stand for no text: sentinels, mode tokens, and those that begin, end and fill sequences."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def padded(rows: Sequence[TokenIds], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows padded on the right, int64 [B, longest, at least 1], and a mask, 1 on real tokens."""
    ids = torch.full((len(rows), max(1, *map(len, rows))), pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
        mask[index, : len(row)] = 1
    return ids.to(device), mask.to(device)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode (no dropout) inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _generation_config(model: PreTrainedModel, settings: GenerationSettings) -> GenerationConfig:
    """Return the model's own settings (special tokens, forced ones), with `settings` for the rest."""
    config: GenerationConfig = deepcopy(model.generation_config)
    config.update(
        max_new_tokens=settings.max_new_tokens,
        max_length=None,
        num_beams=settings.num_beams,
        repetition_penalty=settings.repetition_penalty,
        do_sample=False,  # `_SeededSampling` samples instead
        temperature=None,
        top_p=None,
        top_k=None,
        use_cache=True,
        return_dict_in_generate=False,
    )
    return config


def pad_id_of(config: GenerationConfig) -> int:
    """Return the id that pads rows; masks hide it."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return int(config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id)


def _before(ids: list[int], ends: list[int]) -> list[int]:
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]


def _sampling(settings: GenerationSettings, numbers: Sequence[int]) -> LogitsProcessorList:
    """Return the processors that draw the next tokens of a batch; none if the likeliest are taken."""
    if settings.temperature == 0:
        return LogitsProcessorList()
    limits: list[LogitsProcessor] = [TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        limits.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        limits.append(TopPLogitsWarper(settings.top_p))
    return LogitsProcessorList([*limits, _SeededSampling(settings, numbers)])


class _SeededSampling(LogitsProcessor):
    """Draws the next token of each row with the row's own random numbers, and rules out all other tokens. transformers
    draws for all rows of a batch from one generator, so a text would depend on the others."""

    def __init__(self, settings: GenerationSettings, numbers: Sequence[int]) -> None:
        generators = (keyed_generator(settings.seed, "generation", number) for number in numbers)
        self._draws = np.stack([generator.random(settings.max_new_tokens) for generator in generators])
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Map scores [B, vocabulary] to the same shape: 0 for the drawn token, -inf for all others."""
        cumulative = scores.double().softmax(-1).cumsum(-1)
        draws = torch.from_numpy(self._draws[:, self._step, None]).to(scores.device)
        self._step += 1
        drawn = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn.clamp_max(scores.shape[-1] - 1), 0.0)
