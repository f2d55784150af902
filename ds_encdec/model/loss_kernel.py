"""Losses of rows of logits and their gradients, as one Triton kernel where it runs and as torch operators elsewhere.
The operators read and write the logits about twelve times; the kernel reads each row twice, for its maximum and the sum
of its exponentials, and to write the gradients. With a teacher's logits beside them the operators move 8.6 times the
kernel's bytes (scripts/bench/loss_traffic.py). Both compute in float32. A device gets the kernel only if it compiles
there and agrees with the operators on a few rows."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import trial_problem

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch without CUDA lack it
    triton = None

# Label of a position without loss (`ds_encdec.base.types` holds the same; exported code cannot import it).
IGNORE_INDEX = -100

_BLOCK = 4096
# Columns that a program works on at one time, 16 for each thread, and its warps: two rows of programs fill an SM.
_WARPS = 8


class Extras(NamedTuple):
    """Losses that are optimised beside the cross-entropy; false if no such loss is set."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __bool__(self) -> bool:
        return any(self)


class Taught(NamedTuple):
    """A teacher's view of rows, all of which have labels: its logits, float32 [C, W], contiguous, overwritten, of
    which the first `words` count (no more than the student has); and, to be filled, float32 [C], the divergences
    KL(teacher || student) of both softmaxes at `temperature`. `share` of what is optimised are these, times the squared
    temperature, with which gradients do not shrink (arXiv 1503.02531); the rest are the losses."""

    logits: Tensor
    words: int
    divergences: Tensor
    share: float
    temperature: float


class Rows(NamedTuple):
    """Logits, float32 [C, V], contiguous, overwritten; labels, int64 [C], `IGNORE_INDEX` for no loss; and, to be
    filled, float32 [C], `losses` and `extra_losses` (optimised beside them, None without extras)."""

    logits: Tensor
    labels: Tensor
    losses: Tensor
    extra_losses: Tensor | None
    taught: Taught | None = None


def losses_and_gradients(rows: Rows, gradients_in: torch.dtype | None, scale: float, extras: Extras) -> Tensor | None:
    """Fill the losses of `rows`. Return `scale` times the gradients of the optimised sum with respect to the logits,
    [C, V] in `gradients_in`, in place of the logits if that is float32; None without a dtype."""
    return (_fused if runs_on(rows.logits, gradients_in) else _plain)(rows, gradients_in, scale, extras)


def runs_on(logits: Tensor, gradients_in: torch.dtype | None) -> bool:
    """Return whether the kernel exists, and is correct, for the device of `logits` and that dtype of gradients."""
    return logits.is_cuda and triton is not None and _passes_trial(logits.device, gradients_in)


def _plain(rows: Rows, gradients_in: torch.dtype | None, scale: float, extras: Extras) -> Tensor | None:
    logits, labels, losses, extra_losses, taught = rows
    if taught is not None:
        towards = _away_from_teacher(logits, taught)
        wide = None if gradients_in is None else torch.float32
        own = _plain(rows._replace(taught=None), wide, scale * (1 - taught.share), extras)
        if own is None or gradients_in is None:
            return None
        return own.add_(towards, alpha=scale * taught.share * taught.temperature).to(gradients_in)
    ignored = labels == IGNORE_INDEX
    targets = labels.masked_fill(ignored, 0)[:, None]
    target_logits = logits.gather(1, targets)
    smoothing = extras.label_smoothing
    above_mean = target_logits - logits.mean(dim=-1, keepdim=True) if smoothing else 0.0
    maximum = logits.amax(dim=-1, keepdim=True)
    exponentials = logits.sub_(maximum).exp_()
    normalizer = exponentials.sum(dim=-1, keepdim=True)
    log_normalizer = normalizer.log() + maximum
    losses.copy_((log_normalizer - target_logits).squeeze(1).masked_fill(ignored, 0.0))
    if extra_losses is not None:
        added = smoothing * above_mean + extras.z_loss * log_normalizer.square()
        extra_losses.copy_(added.squeeze(1).masked_fill_(ignored, 0.0))
        normalizer = normalizer / (1 + 2 * extras.z_loss * log_normalizer)
    if gradients_in is None:
        return None
    gradients = exponentials.div_(normalizer / scale)
    gradients.scatter_add_(1, targets, gradients.new_full((1, 1), -scale * (1 - smoothing)).expand_as(targets))
    if smoothing:
        gradients.sub_(scale * smoothing / gradients.shape[1])
    return gradients.masked_fill_(ignored[:, None], 0.0).to(gradients_in)


def _away_from_teacher(logits: Tensor, taught: Taught) -> Tensor:
    """Fill the divergences; return the student's probabilities less the teacher's, at the temperature."""
    teacher = taught.logits[:, : taught.words].div_(taught.temperature)
    student = logits / taught.temperature
    of_known = student[:, : taught.words]
    normalizer = student.logsumexp(dim=-1, keepdim=True)
    teacher -= teacher.logsumexp(dim=-1, keepdim=True)
    probabilities = teacher.exp()
    taught.divergences.copy_((teacher.sub_(of_known).mul_(probabilities).sum(-1, keepdim=True) + normalizer).squeeze(1))
    student.sub_(normalizer).exp_()
    of_known.sub_(probabilities)
    return student


def _fused(rows: Rows, gradients_in: torch.dtype | None, scale: float, extras: Extras) -> Tensor | None:
    gradients = None
    if gradients_in is not None:
        logits = rows.logits
        gradients = logits if gradients_in == logits.dtype else torch.empty_like(logits, dtype=gradients_in)
    _launch(rows, gradients, scale, extras)
    return gradients


def _launch(rows: Rows, gradients: Tensor | None, scale: float, extras: Extras) -> None:
    logits, labels, losses, extra_losses, taught = rows
    with torch.cuda.device_of(logits):
        softmax_rows[(len(logits),)](
            logits,
            labels,
            losses,
            losses if extra_losses is None else extra_losses,
            logits if gradients is None else gradients,
            logits.shape[1],
            *(logits, losses, 1, 1) if taught is None else (taught.logits, taught.divergences),
            *() if taught is None else (taught.logits.shape[1], taught.words),
            scale,
            *extras,
            *(0.0, 1.0) if taught is None else (taught.share, taught.temperature),
            HAS_EXTRAS=extra_losses is not None,
            HAS_TEACHER=taught is not None,
            WRITES_GRADIENTS=gradients is not None,
            IGNORED=IGNORE_INDEX,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


if triton is not None:

    @triton.jit
    def softmax_rows(
        logits: tl.tensor,
        labels: tl.tensor,
        losses: tl.tensor,
        extra_losses: tl.tensor,
        gradients: tl.tensor,
        words: tl.tensor,
        teacher_logits: tl.tensor,
        divergences: tl.tensor,
        teacher_columns: tl.tensor,
        teacher_words: tl.tensor,
        scale: tl.tensor,
        label_smoothing: tl.tensor,
        z_loss: tl.tensor,
        share: tl.tensor,
        temperature: tl.tensor,
        HAS_EXTRAS: tl.constexpr,
        HAS_TEACHER: tl.constexpr,
        WRITES_GRADIENTS: tl.constexpr,
        IGNORED: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """Fill one row's losses, divergence and gradients. A label outside the vocabulary makes the loss a NaN."""
        row = tl.program_id(0).to(tl.int64)  # rows times words may be more than 32 bits hold
        logits += row * words
        teacher_logits += row * teacher_columns
        gradients += row * words
        label = tl.load(labels + row)
        columns = tl.arange(0, BLOCK)
        if label == IGNORED:
            tl.store(losses + row, 0.0)
            if HAS_EXTRAS:
                tl.store(extra_losses + row, 0.0)
            if WRITES_GRADIENTS:
                nothing = tl.zeros([BLOCK], dtype=tl.float32).to(gradients.dtype.element_ty)
                for start in range(0, words, BLOCK):
                    tl.store(gradients + start + columns, nothing, mask=start + columns < words)
        else:
            is_word = (label >= 0) & (label < words)
            target_logit = tl.load(logits + label, mask=is_word, other=float("nan"))
            maximum = tl.full([], float("-inf"), dtype=tl.float32)
            exponentials = tl.zeros([BLOCK], dtype=tl.float32)
            logit_sums = tl.zeros([BLOCK], dtype=tl.float32)
            colder = 1.0 / temperature
            cooled = tl.zeros([BLOCK], dtype=tl.float32)  # the student's exponentials at the temperature
            teacher_maximum = tl.full([], float("-inf"), dtype=tl.float32)
            taught = tl.zeros([BLOCK], dtype=tl.float32)  # the teacher's exponentials, and these times the difference
            apart = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, words, BLOCK):
                exists = start + columns < words
                block = tl.load(logits + start + columns, mask=exists, other=float("-inf"))
                new_maximum = tl.maximum(maximum, tl.max(block, axis=0))
                exponentials = exponentials * tl.exp(maximum - new_maximum) + tl.exp(block - new_maximum)
                if HAS_TEACHER:
                    cooled = cooled * tl.exp((maximum - new_maximum) * colder) + tl.exp((block - new_maximum) * colder)
                    known = start + columns < teacher_words
                    said = tl.load(teacher_logits + start + columns, mask=known, other=float("-inf"))
                    new_teacher = tl.maximum(teacher_maximum, tl.max(said, axis=0))
                    fading = tl.exp((teacher_maximum - new_teacher) * colder)
                    exponential = tl.exp((said - new_teacher) * colder)
                    taught = taught * fading + exponential
                    apart = apart * fading + tl.where(known, exponential * (said - block) * colder, 0.0)
                    teacher_maximum = new_teacher
                maximum = new_maximum
                if HAS_EXTRAS:
                    logit_sums += tl.where(exists, block, 0.0)
            normalizer = tl.sum(exponentials, axis=0)
            log_normalizer = tl.log(normalizer) + maximum
            tl.store(losses + row, log_normalizer - target_logit)
            own = scale * (1.0 - share)
            factor = own / normalizer
            if HAS_TEACHER:
                cooled_normalizer = tl.log(tl.sum(cooled, axis=0)) + maximum * colder
                teacher_sum = tl.sum(taught, axis=0)
                teacher_normalizer = tl.log(teacher_sum) + teacher_maximum * colder
                divergence = tl.sum(apart, axis=0) / teacher_sum - teacher_normalizer + cooled_normalizer
                tl.store(divergences + row, divergence)
            if HAS_EXTRAS:
                above_mean = target_logit - tl.sum(logit_sums, axis=0) / words
                tl.store(extra_losses + row, label_smoothing * above_mean + z_loss * log_normalizer * log_normalizer)
                factor *= 1.0 + 2.0 * z_loss * log_normalizer
            if WRITES_GRADIENTS:
                of_target = own * (1.0 - label_smoothing)
                of_each = own * label_smoothing / words
                for start in range(0, words, BLOCK):
                    exists = start + columns < words
                    block = tl.load(logits + start + columns, mask=exists, other=float("-inf"))
                    gradient = tl.exp(block - maximum) * factor - of_each
                    gradient -= tl.where(start + columns == label, of_target, 0.0)
                    if HAS_TEACHER:
                        known = start + columns < teacher_words
                        said = tl.load(teacher_logits + start + columns, mask=known, other=float("-inf"))
                        away = tl.exp(block * colder - cooled_normalizer) - tl.exp(said * colder - teacher_normalizer)
                        gradient += scale * share * temperature * away
                    tl.store(gradients + start + columns, gradient.to(gradients.dtype.element_ty), mask=exists)


@cache
def _passes_trial(device: torch.device, gradients_in: torch.dtype | None) -> bool:
    warning = f"The loss runs on {device} without its kernel, which is slower"
    return not trial_problem(lambda: trial_error(device, gradients_in), warning)


def trial_error(device: torch.device, gradients_in: torch.dtype | None) -> float:
    """Return the kernel's largest difference from the operators, over what rounding may explain; NaN if any is."""
    generator = torch.Generator().manual_seed(0)
    scale, ratios, epsilon = 8.0, [], torch.finfo(torch.float32).eps
    # Triton compiles another kernel for a number of words that 16 divides.
    plain, both = Extras(), Extras(0.1, 1e-3)
    for words, extras, known in (
        (_BLOCK + 321, plain, 0),
        (_BLOCK + 336, plain, 0),
        (_BLOCK + 336, both, 0),
        (_BLOCK + 336, both, _BLOCK + 7),
    ):
        logits = (4 * torch.randn(3, words, generator=generator)).to(device)
        of_logits = 8 * epsilon * float(logits.abs().max())
        labels = torch.tensor([words - 1, 0 if known else IGNORE_INDEX, 5], device=device)
        results: list[list[Tensor]] = []
        for fill in (_fused, _plain):
            losses, divergences = torch.empty(3, device=device), torch.empty(3, device=device)
            extra_losses = torch.empty_like(losses) if extras else None
            taught = Taught(logits.roll(1, 0), known, divergences, 0.5, 2.0) if known else None
            gradients = fill(Rows(logits.clone(), labels, losses, extra_losses, taught), gradients_in, scale, extras)
            filled = (losses, extra_losses, divergences if known else None, gradients)
            results.append([one for one in filled if one is not None])
        for actual, expected in zip(*results, strict=True):
            size = expected.float().abs()
            rounding = 2 * torch.finfo(expected.dtype).eps * size
            rounding += of_logits * size + 4 * epsilon * scale if expected.dim() == 2 else of_logits
            ratios.append(((actual.float() - expected.float()).abs() / rounding).max())
    return float(torch.stack(ratios).max())
