"""A frozen teacher inside the model that learns from it, of which no checkpoint, export or copy has a weight.

A decoder teaches examples whose output goes on with their input: it reads [input ; target] as one text, in our own
decoder behind an empty encoder, which is that decoder. An encoder-decoder reads the student's own batch. Both run in
the student's forward pass, and the student's loss inside the teacher's, so that engines gather both heads by their own
hooks. The teacher's part needs no gradient: nothing of it is kept for the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from ds_encdec.base.types import Batch, CheckpointError, ConfigError, WeightSource
from ds_encdec.config.sections import Sections
from ds_encdec.config.stored_model import model_folder, read_stored_model, teacher_place, teacher_problem
from ds_encdec.config.training_sections import TrainingConfig
from ds_encdec.model.attention import PackedLayout, permuted
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.depth import Depth
from ds_encdec.model.loss import Teacher, distilled_cross_entropy
from ds_encdec.model.modeling import LanguageModelHead, PackedLossOutput, Qwen3ForSeq2SeqLM
from ds_encdec.model.source import COPIED, Base, architecture
from ds_encdec.model.weights import stored_weights
from ds_encdec.registry.families import FAMILIES
from ds_encdec.registry.objectives import TASKS
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.tokenizer.sentinels import Vocabulary

FIELD, TEACHER = "training.teacher", "teacher."  # the setting, and what the names of its parameters begin with
Within = Callable[[Tensor, Tensor], None]  # called with a teacher's states and its head's weight


@dataclass(frozen=True)
class TeacherSource:
    """A teacher before it is built. `words`: the ids that it has in common with the student, from the first one on."""

    name: str
    config: Qwen3Seq2SeqConfig
    base: Base
    words: int

    @property
    def is_decoder(self) -> bool:
        """True if it is a decoder alone."""
        return self.config.num_encoder_layers == 0


def is_of_teacher(name: str) -> bool:
    """Return whether the parameter `name` of a student is its teacher's."""
    return name.startswith(TEACHER)


def of_teacher(weights: WeightSource) -> WeightSource:
    """Return the `weights` of a teacher by their names in its student."""
    return lambda name, rows=slice(None), /: weights(name.removeprefix(TEACHER), rows)


def resolve_teacher(
    config: Sections, tokenizer: PreTrainedTokenizerFast, vocabulary: Vocabulary
) -> TeacherSource | None:
    """Return the teacher of `config`, if there is one, for a student with this tokenizer. Raises CheckpointError for
    one that cannot be read, ConfigError for one with other token ids, or that would teach nothing."""
    name = teacher_place(config)
    if name is None:
        return None
    folder = model_folder(name, field=FIELD)
    stored = read_stored_model(folder / "config.json")
    if problem := teacher_problem(config, stored):
        raise ConfigError(f"{FIELD}={config.training.teacher}: {problem}")
    family, layers = FAMILIES.get(stored["model_type"]), stored["num_hidden_layers"]
    if family is None:
        fields = {name: stored[name] for name in stored.keys() - {"auto_map", "architectures", "dtype", "code_sha256"}}
    else:
        fields = {name: stored[name] for name in COPIED if name in stored} | {
            "tie_word_embeddings": stored.get("tie_word_embeddings", False),
            "unrotated_layers": {"decoder": list(stored["unrotated_layers"])},
            **{"cross_attention": "final", "encoder_positions": "unrotated", "num_encoder_layers": 0},
            **{"pad_token_id": vocabulary.pad_id, "eos_token_id": vocabulary.eos_id},
            "decoder_start_token_id": vocabulary.start_id,
        }
    try:
        made = Qwen3Seq2SeqConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    origin = None if family is None else (family, Depth((), tuple(range(layers))))
    weights = stored_weights(folder, made, (), stored_rows=made.vocab_size, seed=0, origin=origin)
    known = pretrained_tokenizer(name, field=FIELD).get_vocab()
    words = _common_words(name, known, tokenizer.get_vocab(), vocabulary, made)
    return TeacherSource(name, made, Base(weights, folder, {"architecture": architecture(made)}), words)


def _common_words(
    name: str, known: dict[str, int], ours: dict[str, int], vocabulary: Vocabulary, config: Qwen3Seq2SeqConfig
) -> int:
    added = {*vocabulary.sentinel_ids, *vocabulary.mode_token_ids}
    differing = {token: number for token, number in ours.items() if known.get(token) != number}
    if others := sorted((number, token) for token, number in differing.items() if number not in added):
        number, token = others[0]
        raise ConfigError(
            f"{FIELD}={name} has another vocabulary: the student's token {token!r} is id {number}, but there "
            f"{known.get(token, 'does not exist')} ({len(others):,} tokens differ). Take a teacher with the same "
            "tokenizer, or train without one"
        )
    words = min(*differing.values(), vocabulary.vocab_size, config.vocab_size)
    if config.num_encoder_layers and words < vocabulary.vocab_size:
        raise ConfigError(
            f"{FIELD}={name} is an encoder-decoder with other sentinels or mode tokens: set model.num_sentinel_tokens="
            f"{len(config.sentinel_token_ids)} and data.use_mode_tokens={str(bool(config.mode_token_ids)).lower()}, as "
            "it was trained"
        )
    return words


@dataclass(frozen=True)
class Lesson:
    """The places of what a teacher teaches in a batch. `order`: int64 [Td], the decoder's tokens that it teaches,
    ascending, and then all others; `inverse` takes back. `rows`: int64 [R], the teacher's states that predict the first
    of these. A decoder reads texts, packed as in `packing`, whose ids stand at the places `index` of [encoder's ids ;
    decoder's input]; an encoder-decoder without them reads the student's batch."""

    order: Tensor
    inverse: Tensor
    rows: Tensor
    index: Tensor
    packing: PackedLayout | None


def lesson_of(batch: Batch, *, by_decoder: bool) -> Lesson:
    """Return the lesson of `batch`, on its device. Lengths are known on the host, so nothing waits for the device."""
    nothing = np.empty(0, dtype=np.int64)
    tokens, rows, index, positions = ([nothing] for _ in range(4))
    lengths: list[int] = []
    start = decoder_start = 0
    for task, length, decoder_length in zip(batch.tasks, batch.encoder_lengths, batch.decoder_lengths, strict=True):
        if not by_decoder:
            tokens.append(np.arange(decoder_start, decoder_start + decoder_length))
            rows.append(tokens[-1])
        elif TASKS[task].continues and length + decoder_length > 1:
            numbers = np.arange(length == 0, decoder_length)  # behind no text a decoder predicts nothing
            tokens.append(decoder_start + numbers)
            rows.append(sum(lengths) + length - 1 + numbers)
            goes_on = len(batch.encoder_ids) + decoder_start + np.arange(1, decoder_length)
            index += [np.arange(start, start + length), goes_on]
            lengths.append(length + decoder_length - 1)
            positions.append(np.arange(lengths[-1]))
        start, decoder_start = start + length, decoder_start + decoder_length
    others = np.setdiff1d(np.arange(len(batch.labels)), np.concatenate(tokens))
    # Behind all texts stands one more token: all ranks gather the teacher's layers together, and none reads nothing.
    positions.append(np.zeros(1, dtype=np.int64))
    taught = np.concatenate([*tokens, others])
    parts = [taught, np.argsort(taught), *map(np.concatenate, (rows, index, positions)), np.cumsum([0, *lengths])]
    joined = torch.from_numpy(np.concatenate(parts))
    joined = joined.pin_memory() if batch.labels.is_cuda else joined
    moved = joined.to(batch.labels.device, non_blocking=True).split([len(part) for part in parts])
    *told, at, ends = moved
    packing = None
    if by_decoder:
        ends = ends.int()
        packing = PackedLayout.build(torch.zeros_like(ends), ends, (0,) * len(lengths), tuple(lengths), at[:0], at)
    return Lesson(told[0], told[1], told[2], told[3], packing)


class DistillingHead(LanguageModelHead):
    """The output layer of a student beside its teacher's, or of a teacher."""

    def forward(self, *inputs: Any, teacher: Teacher | None = None, within: Within | None = None) -> Any:
        """Call `within`, if given, with this layer's input and weight, while that is whole; otherwise return what
        `LanguageModelHead` does, beside a `teacher` also the divergences."""
        if within is not None:
            within(inputs[0], self.weight)
            return None
        if teacher is None:
            return super().forward(*inputs)
        hidden_states, labels, chunk_tokens = inputs
        extras = (self.label_smoothing, self.z_loss) if self.training else ()
        return distilled_cross_entropy(hidden_states, self.weight, labels, chunk_tokens, teacher, *extras)


class TeacherModel(Qwen3ForSeq2SeqLM):
    """A model that teaches: its packed form returns nothing, but calls a function while its head is whole."""

    head = DistillingHead

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, decoder_input_ids: Tensor, packing: PackedLayout, within: Within
    ) -> None:
        """Call `within` with the states [Td, hidden] and the head's weight."""
        with torch.no_grad():
            states = self.packed_states(input_ids, decoder_input_ids, packing)
        self.lm_head(states, within=within)


class DistilledSeq2SeqLM(Qwen3ForSeq2SeqLM):
    """A student, and once `attach` has been called its `teacher`."""

    head = DistillingHead
    teacher: TeacherModel

    def attach(self, source: TeacherSource, training: TrainingConfig) -> None:
        """Make the frozen teacher, without values."""
        self.teacher = TeacherModel(source.config).requires_grad_(False)
        self.teacher.config.use_flash_attention = self.config.use_flash_attention
        self._words = source.words
        self._share, self._temperature = training.teacher_weight, training.teacher_temperature

    def forward(self, *args: Any, lesson: Lesson | None = None, **kwargs: Any) -> Any:
        """Return what the parent does; with a `lesson`, of a packed batch, the loss beside the teacher."""
        return super().forward(*args, **kwargs) if lesson is None else self._taught_loss(lesson, **kwargs)

    def _taught_loss(
        self, lesson: Lesson, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor, packing: PackedLayout
    ) -> PackedLossOutput:
        states = permuted(self.packed_states(input_ids, decoder_input_ids, packing), lesson.order, lesson.inverse)
        found: list[Tensor] = []

        def within(said: Tensor, weight: Tensor) -> None:
            teacher = Teacher(said[lesson.rows], weight, self._words, self._share, self._temperature)
            inputs = states, labels[lesson.order], self.config.loss_chunk_tokens
            found.extend(self.lm_head(*inputs, teacher=teacher))

        if lesson.packing is not None:
            texts = torch.cat([input_ids, decoder_input_ids])[lesson.index]
            input_ids, decoder_input_ids, packing = input_ids[:0], nn.functional.pad(texts, (0, 1)), lesson.packing
        self.teacher(input_ids, decoder_input_ids, packing, within)
        total, token_losses, divergences = found
        return PackedLossOutput(loss=total, token_losses=token_losses[lesson.inverse], divergences=divergences)
