"""Small teachers with tokenizers, batches for them, and their lesson in plain torch, one document at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ds_encdec.base.types import Batch, Example
from ds_encdec.config.shares import Budgets
from ds_encdec.data.loader import collate
from ds_encdec.tokenizer.sentinels import Vocabulary, add_sentinels

WORDS = 80
"""Ids of text; sentinels take those above, of which a teacher's embedding has some rows, too."""


def word_tokenizer(words: int = WORDS, first: str = "w") -> PreTrainedTokenizerFast:
    """A tokenizer of single words, `w0` to pad and `w1` at the end."""
    vocabulary = {f"{first}{number}": number for number in range(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=f"{first}2"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"{first}0", eos_token=f"{first}1")


def student_vocabulary(sentinels: int = 4, *, mode_tokens: bool = False) -> tuple[PreTrainedTokenizerFast, Vocabulary]:
    tokenizer = word_tokenizer()
    return tokenizer, add_sentinels(tokenizer, sentinels, mode_tokens=mode_tokens)


def teacher_folder(folder: Path, family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    """Write a decoder of `family`, with attention far from uniform and norms that differ, and its tokenizer."""
    torch.manual_seed(3)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    sizes = {"vocab_size": WORDS + 2, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {**heads, "max_position_embeddings": 64, **changes}
    named = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.2}
    config = AutoConfig.for_model(family, **sizes, **named)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return model


def batch_of(tasks: Sequence[str], seed: int = 0, lengths: Sequence[tuple[int, int]] | None = None) -> Batch:
    """An example of random text for each task, padded; those of span denoisers have sentinels on both sides."""
    draw = torch.Generator().manual_seed(seed)
    examples = []
    for number, task in enumerate(tasks):
        drawn = torch.randint(1, 9, (2,), generator=draw).tolist()
        source, target = (
            torch.randint(1, WORDS, (length,), generator=draw).int().numpy()
            for length in (lengths[number] if lengths else drawn)
        )
        if task not in ("S", "SFT"):
            source[-1:] = target[:1] = WORDS
        examples.append(Example(source, target, task, str(number)))
    encoder, decoder = (sum(one.tokens[side] for one in examples) for side in (0, 1))
    return collate(examples, Budgets(encoder + 5, decoder + 3, 8), start_id=0)


def documents(batch: Batch) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Task, input, decoder's input and targets of each document."""
    sides = [(batch.encoder_ids, batch.encoder_lengths)]
    sides += [(ids, batch.decoder_lengths) for ids in (batch.decoder_input_ids, batch.labels)]
    split = [ids[: sum(lengths)].split(lengths) for ids, lengths in sides]
    return list(zip(batch.tasks, *split, strict=True))


def reference(
    student: Any, teacher: PreTrainedModel, batch: Batch, share: float, temperature: float, words: int = WORDS
) -> tuple[Tensor, Tensor, Tensor]:
    """The optimised sum with gradients to `student`, the token losses and the divergences, in plain torch."""
    total, losses, divergences = torch.zeros(()), [], []
    for task, source, shifted, target in documents(batch):
        logits = student(input_ids=source[None], decoder_input_ids=shifted[None]).logits[0]
        own = F.cross_entropy(logits, target, reduction="none")
        losses.append(own.detach())
        if task not in ("S", "SFT"):
            total = total + own.sum()
            continue
        first = int(len(source) == 0)
        text = torch.cat([source, target[:-1]])
        with torch.no_grad():
            said = teacher(text[None]).logits[0, len(source) - 1 + first :, :words] if len(text) else logits[:0, :words]
        padded = torch.full((len(said), logits.shape[1]), -torch.inf)
        padded[:, :words] = said
        student_log = F.log_softmax(logits[first:] / temperature, -1)
        away = F.kl_div(student_log, F.softmax(padded / temperature, -1), reduction="none").sum(-1)
        divergences.append(away.detach())
        total = total + own[:first].sum() + (1 - share) * own[first:].sum() + share * temperature**2 * away.sum()
    return total, torch.cat(losses), torch.cat([torch.empty(0), *divergences])
