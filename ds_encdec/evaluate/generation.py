"""Generate by the model's own `generate()` with its cache, for many inputs in batches of similar length or for one text
(`ds-encdec generate`); and score given targets by the loss on them."""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ds_encdec.base.terminal import print_text
from ds_encdec.base.types import IGNORE_INDEX, CheckpointError
from ds_encdec.config.generation import GenerationSettings
from ds_encdec.data.examples.sft import ChatTemplate
from ds_encdec.data.randomness import keyed_generator
from ds_encdec.evaluate.models import open_model
from ds_encdec.launch.process_group import choose_device
from ds_encdec.launch.world import discover
from ds_encdec.model.depth import beyond_positions
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.tokenizer.sentinels import added_bos

logger = logging.getLogger(__name__)

TokenIds = Sequence[int] | np.ndarray
# The most logits of a batch, unless one row by itself has more: 512 MiB in float32, and as much for their softmax.
MOST_LOGITS = 2**27
_SENTINEL = re.compile(r"<extra_id_\d+>")


def plan_batches(encoder_ids: Sequence[TokenIds], settings: GenerationSettings) -> list[list[int]]:
    """Divide the inputs into batches of similar length, each a list of their numbers, the longest first. Nothing but
    the lengths and the settings counts, so that ranks and later runs divide them alike."""
    batches: list[list[int]] = []
    for number in sorted(range(len(encoder_ids)), key=lambda number: -len(encoder_ids[number])):
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
    """Generate for the inputs `numbers` as one batch; see `generate`. `streamer` gets each token of a single row."""
    if not settings.max_new_tokens:
        return [[] for _ in numbers]
    config: GenerationConfig = deepcopy(model.generation_config)  # with its special tokens, and forced ones
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
    ids, mask = padded([encoder_ids[number] for number in numbers], _pad_id(config), model.device)
    processors = LogitsProcessorList()
    if settings.temperature:
        processors.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_k:
            processors.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            processors.append(TopPLogitsWarper(settings.top_p))
        processors.append(_SeededSampling(settings, numbers))
    rows = model.eval().generate(
        ids, attention_mask=mask, generation_config=config, logits_processor=processors, streamer=streamer
    )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [list(takewhile(lambda token: token not in ends, row[1:])) for row in rows.tolist()]


@torch.no_grad()
def score_targets(
    model: PreTrainedModel, encoder_ids: Sequence[TokenIds], target_ids: Sequence[TokenIds], batch_tokens: int
) -> list[tuple[float, list[bool]]]:
    """Return for each target its log-probability in nats after its input, and whether each of its tokens was the
    likeliest one after the input and those before it. All tokens count, an end token too. `batch_tokens`: the most of a
    batch, of both sides together, padding included."""
    scores: list[tuple[float, list[bool]]] = [(0.0, [])] * len(target_ids)
    order = sorted(range(len(target_ids)), key=lambda number: -len(encoder_ids[number]) - len(target_ids[number]))
    longest, longest_target = max(map(len, encoder_ids)), max(map(len, target_ids))
    logits_of_row = longest_target * int(model.config.vocab_size)
    rows = max(1, min(batch_tokens // (longest + longest_target), MOST_LOGITS // logits_of_row))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        ids, mask = padded([encoder_ids[number] for number in batch], _pad_id(model.generation_config), model.device)
        labels, _ = padded([target_ids[number] for number in batch], IGNORE_INDEX, model.device)
        inputs = {"input_ids": ids, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
        logits = model.eval()(**inputs, attention_mask=mask, use_cache=False).logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
        sums, hits = (-losses.double().sum(-1)).tolist(), (logits.argmax(-1) == labels).tolist()
        del logits, losses  # their memory is needed for the next batch
        for number, log_probability, row in zip(batch, sums, hits, strict=True):
            scores[number] = log_probability, row[: len(target_ids[number])]
    return scores


def text_of(tokenizer: PreTrainedTokenizerFast, ids: TokenIds) -> str:
    """Return the text of tokens, without those that begin, end and fill sequences. Sentinels stay."""
    marks = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "cls", "sep")}
    shown = [int(token) for token in ids if token not in marks]
    return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the ids that stand for no text: sentinels, mode tokens, and those that begin, end and fill sequences."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def padded(rows: Sequence[TokenIds], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of a batch, int64 [B, L], padded on the right."""
    ids = torch.full((len(rows), max(1, *map(len, rows))), pad_id)  # int64
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
        mask[index, : len(row)] = 1
    return ids.to(device), mask.to(device)


def _pad_id(config: GenerationConfig) -> int:
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    return int(end if config.pad_token_id is None else config.pad_token_id)


class _SeededSampling(LogitsProcessor):
    """Draws the next token of each row with the row's own random numbers, and rules out all other tokens. transformers
    draws for all rows of a batch from one generator, so a text would depend on the others."""

    def __init__(self, settings: GenerationSettings, numbers: Sequence[int]) -> None:
        generators = (keyed_generator(settings.seed, "generation", number) for number in numbers)
        self._draws = np.stack([generator.random(settings.max_new_tokens) for generator in generators])
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cumulative = scores.double().softmax(-1).cumsum(-1)  # [B, vocabulary], as the result
        draws = torch.from_numpy(self._draws[:, self._step, None]).to(scores.device)
        self._step += 1
        drawn = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn.clamp_max(scores.shape[-1] - 1), 0.0)


def generate_text(folder: Path, text: str, settings: GenerationSettings, *, raw: bool, stream: bool) -> str | None:
    """Return `text` with its sentinels (`<extra_id_0>`…) filled in or, if it has none, `text` and its continuation.

    A sentinel that the model does not answer stays in the text. Fillings have blanks for runs of white space; a
    continuation has no sentinels, and one empty line at most instead of several. `raw`: return the model's output
    alone, as always for a model whose card says that it was fine-tuned. Unless `raw`, a model of conversations reads
    `text` as the user's turn of its chat template, which stderr reports. `stream`: print the output while it is made;
    returns None if nothing more is to be shown. Raises CheckpointError.
    """
    tokenizer = pretrained_tokenizer(str(folder), field="--model")
    card = (folder / "README.md").read_text("utf-8", "replace") if (folder / "README.md").is_file() else ""
    has_template, has_turns = (f"\n| {fact} |" in card for fact in ("input_template", "Conversations"))
    if has_turns and not has_template and not raw:
        text = _as_turn(text, tokenizer)
    raw = raw or has_template or has_turns
    model = open_model(folder, choose_device("auto", discover(os.environ)))
    continues = not raw and not _SENTINEL.search(text)
    if stream and continues:
        print_text(text, end="")
    encoder_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if model.config.mode_token_ids:  # it was trained with them before each input
        has_spans = _SENTINEL.search(text) is not None
        modes = zip(DENOISERS.values(), model.config.mode_token_ids, strict=False)
        encoder_ids.insert(0, next(token for row, token in modes if (row.mean_span is not None) == has_spans))
    bos = added_bos(tokenizer)
    if bos is not None and encoder_ids[:1] != [bos]:
        encoder_ids.insert(0, bos)
    if problem := beyond_positions(model.config, len(encoder_ids), settings.max_new_tokens):
        logger.warning(problem)
    # A tokenizer of words with their blanks drops the first blank of a text: a continuation's is wanted.
    before = encoder_ids if continues else []
    streamer = _Streamer(tokenizer, before) if stream else None
    generated = generate_batch(model, [encoder_ids], [0], settings, streamer=streamer)[0]
    target = text_of(tokenizer, [*before, *generated])[len(text_of(tokenizer, before)) :]
    if stream and (raw or continues):
        return None
    if raw:
        return target
    shown = readable(target, continues)
    return text + shown if continues else fill_sentinels(text, shown)


def _as_turn(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    if (chat := ChatTemplate.of(tokenizer)) is None:
        return text
    try:
        rendered = chat.render([{"role": "user", "content": text}], None, is_prompt=True)
    except ValueError as error:
        raise CheckpointError(f"--model: {error} for a user's turn alone; --raw takes a text of any form") from error
    print("The text is the user's turn in the model's chat template (--raw: it is all).", file=sys.stderr)
    return rendered


def readable(target: str, continues: bool) -> str:
    """Return the model's `target` for people: spans on one line; or a continuation, without sentinels."""
    if continues:
        return re.sub(r"\n\s*\n\s*\n", "\n\n", _SENTINEL.sub("", target)).rstrip()
    return re.sub(r"\s+", " ", target).rstrip()


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerFast, before: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.token_cache, self.print_len = [*before], len(tokenizer.decode(before))  # as if printed

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print_text(text, "\n" if stream_end else "")

    def put(self, value: Tensor) -> None:
        if self.next_tokens_are_prompt or text_of(self.tokenizer, value.tolist()):
            super().put(value)


def fill_sentinels(text: str, target: str) -> str:
    """Replace the sentinels of `text` by the spans of `target` ("<extra_id_0> span <extra_id_1> span …")."""
    spans = dict(zip(_SENTINEL.findall(target), _SENTINEL.split(target)[1:], strict=True))
    return _SENTINEL.sub(lambda match: spans.get(match.group(), match.group()), text)
