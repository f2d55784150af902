"""A teacher inside its student: what it says, what the student learns of it, and which teachers are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taught import WORDS, batch_of, documents, reference, student_vocabulary, teacher_folder, word_tokenizer
from tiny_models import tiny_config, tiny_model

from ds_encdec.base.types import CheckpointError, ConfigError
from ds_encdec.config.schema import load_config
from ds_encdec.engine.sharded_engine import unfilled
from ds_encdec.model.distillation import DistilledSeq2SeqLM, TeacherSource, lesson_of, resolve_teacher
from ds_encdec.objectives.protocol import run_packed

MIXED = ("S", "R1", "SFT", "X2", "S")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "olmo2": {"num_hidden_layers": 3},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def student_of(source: TeacherSource, share: float = 0.4, temperature: float = 1.5, **changes: Any) -> Any:
    """A random student, and in it the filled teacher."""
    student = DistilledSeq2SeqLM(tiny_config(**changes))
    plain = tiny_model(**changes)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            parameter.copy_(plain.get_parameter(name))
    with unfilled(torch.float32, torch.device("cpu")):
        student.attach(source, SimpleNamespace(teacher_weight=share, teacher_temperature=temperature))
    with torch.no_grad():
        for name, parameter in student.teacher.named_parameters():
            parameter.copy_(source.base.weights(name))
    return student


def teacher_in(folder: Path, **settings: Any) -> TeacherSource:
    given = {"model.model_name_or_path": folder, "training.teacher": folder, **settings}
    config = load_config(None, [f"{name}={value}" for name, value in given.items()])
    source = resolve_teacher(config, *student_vocabulary(mode_tokens=config.data.use_mode_tokens))
    assert source is not None
    return source


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_teaches_what_transformers_own_class_says(tmp_path: Path, family: str) -> None:
    theirs = teacher_folder(tmp_path, family, **FAMILIES[family])
    source = teacher_in(tmp_path)
    assert source.is_decoder
    assert source.words == WORDS  # its other rows are ids of the student's sentinels
    student, batch = student_of(source), batch_of(MIXED)
    found = run_packed(student, batch, lesson=lesson_of(batch, by_decoder=True))
    found.loss.backward()
    taught = gradients(student)
    assert not any(name.startswith("teacher.") for name in taught)
    student.zero_grad()
    total, token_losses, divergences = reference(student, theirs, batch, 0.4, 1.5)
    total.backward()
    torch.testing.assert_close(found.loss, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.token_losses[: len(token_losses)], token_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.divergences, divergences, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(
            taught[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    ("tasks", "lengths"),
    [
        (("R1", "X1"), None),
        (("S", "SFT", "S"), ((0, 4), (0, 1), (3, 1))),
        (("SFT", "S"), ((5, 6), (2, 7))),
    ],
)
def test_batches_without_texts_and_texts_without_input(tmp_path: Path, tasks: Any, lengths: Any) -> None:
    theirs = teacher_folder(tmp_path)
    student = student_of(teacher_in(tmp_path))
    batch = batch_of(tasks, 1, lengths)
    found = run_packed(student, batch, lesson=lesson_of(batch, by_decoder=True))
    total, token_losses, divergences = reference(student, theirs, batch, 0.4, 1.5)
    torch.testing.assert_close(found.loss, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.token_losses[: len(token_losses)], token_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.divergences, divergences, rtol=1e-5, atol=1e-5)
    assert len(found.divergences) == {2: 0 if tasks[0] == "R1" else 13, 3: 4}[len(tasks)]


def own_folder(folder: Path, sentinels: int = 4) -> Any:
    """Write an encoder-decoder of ours, with its tokenizer."""
    tokenizer, vocabulary = student_vocabulary(sentinels)
    model = tiny_model(sentinel_token_ids=list(vocabulary.sentinel_ids), encoder_positions="prefix")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_an_encoder_decoder_teaches_all_examples(tmp_path: Path) -> None:
    theirs = own_folder(tmp_path)
    source = teacher_in(tmp_path)
    assert not source.is_decoder
    student, batch = student_of(source, 1.0, 1.0, cross_attention="renormed"), batch_of(MIXED)
    found = run_packed(student, batch, lesson=lesson_of(batch, by_decoder=False))
    own, said = (
        torch.log_softmax(run_packed_logits(model, batch)[:, : source.words if model is theirs else None], -1)
        for model in (student, theirs)
    )
    expected = (said.exp() * (said - own[:, : source.words])).sum(-1)
    torch.testing.assert_close(found.divergences, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.sum(), rtol=1e-5, atol=1e-5)


def run_packed_logits(model: Any, batch: Any) -> torch.Tensor:
    """The logits of all targets, one document at a time."""
    logits = (model(input_ids=x[None], decoder_input_ids=y[None]).logits[0] for _, x, y, _ in documents(batch))
    return torch.cat(list(logits))


def test_a_teacher_with_other_ids_is_refused(tmp_path: Path) -> None:
    teacher_folder(tmp_path)
    word_tokenizer(first="v").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"another vocabulary: the student's token 'w0' is id 0, but there does not"):
        teacher_in(tmp_path)
    word_tokenizer(WORDS - 10).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'w70' is id 70.*10 tokens differ"):
        teacher_in(tmp_path)


def test_a_decoder_beside_mode_tokens_and_other_sentinels_are_refused(tmp_path: Path) -> None:
    teacher_folder(tmp_path / "decoder")
    with pytest.raises(ConfigError, match=r"a decoder knows no mode tokens: set data.use_mode_tokens=false"):
        teacher_in(tmp_path / "decoder", **{"data.use_mode_tokens": "true"})
    with pytest.raises(ConfigError, match=r"raise S in data.ul2_task_weights"):
        teacher_in(tmp_path / "decoder", **{"data.ul2_task_weights": [1, 1, 1, 1, 0]})
    own_folder(tmp_path / "own", sentinels=3)
    with pytest.raises(ConfigError, match=r"training.teacher=source: model.model_name_or_path is no decoder"):
        teacher_in(tmp_path / "own", **{"training.teacher": "source"})
    with pytest.raises(ConfigError, match=r"model.num_sentinel_tokens=3 and data.use_mode_tokens=false"):
        teacher_in(tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"training.teacher: the folder .* does not exist"):
        teacher_in(tmp_path / "nothing")
