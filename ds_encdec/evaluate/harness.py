"""Our models for EleutherAI's lm-evaluation-harness: its command, with `--model ds_encdec`.

    python -m ds_encdec.evaluate.harness --model ds_encdec --model_args model=OUT --tasks TASK --include_path DIR

A task's context goes to the encoder, and the decoder generates or is given the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ds_encdec.config.generation import GenerationSettings
from ds_encdec.evaluate.generation import generate_batch, plan_batches, text_of
from ds_encdec.evaluate.models import open_model, open_tokenizer
from ds_encdec.evaluate.scoring import score_targets
from ds_encdec.types import ConfigError, DsEncDecError

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    problem = ConfigError(f"lm-eval cannot be imported ({error}): pip install 'ds_encdec[lm-eval]'")
    if __name__ != "__main__":
        raise problem from error
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(problem.exit_code)

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerFast


@register_model("ds_encdec")
class EncoderDecoderLM(LM):
    """An exported encoder-decoder, as the harness asks for it.

    `model`: its folder. `max_gen_toks`: new tokens at most, where a task does not say. `batch_tokens` and `seed`: see
    `GenerationSettings`. What the harness hands to every model and ours has no use for (`batch_size`) is passed over.
    """

    def __init__(
        self,
        model: str,
        device: str | None = None,
        dtype: str | None = None,
        max_gen_toks: int = 256,
        batch_tokens: int = GenerationSettings.batch_tokens,
        seed: int = 0,
        **_: Any,
    ) -> None:
        super().__init__()
        folder = Path(model)
        # The harness asks for cuda:0 unless it is told otherwise, whatever there is.
        self._device = torch.device((device or "cuda") if torch.cuda.is_available() else "cpu")
        self.tokenizer: PreTrainedTokenizerFast = open_tokenizer(folder)
        self.model = open_model(folder, self._device, dtype)
        self._settings = GenerationSettings(max_new_tokens=max_gen_toks, batch_tokens=batch_tokens, seed=seed)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the continuation's log-probability, without an end, and whether greedy."""
        pairs = [request.args for request in requests]
        contexts, continuations = (self._encode(texts) for texts in zip(*pairs, strict=True))
        scores = score_targets(self.model, contexts, continuations, self._settings.batch_tokens)
        for pair, score in zip(pairs, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, tuple(score))
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Refuse: the likelihood of a text without an input is no quantity of an encoder-decoder."""
        raise ConfigError(
            f"task {requests[0].task_name}: it asks for the likelihood of whole texts (loglikelihood_rolling), which "
            "an encoder-decoder does not have: it predicts an output given an input. Take a task with output_type "
            "generate_until, multiple_choice or loglikelihood"
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """For each (context, settings): the generated text, up to the first of the settings' strings `until`."""
        groups: dict[tuple[GenerationSettings, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._how(request.args[1]), []).append(number)
        encoded = self._encode([request.args[0] for request in requests])
        texts = [""] * len(requests)
        for (settings, until), numbers in groups.items():
            for batch in plan_batches([encoded[number] for number in numbers], settings):
                chosen = [numbers[index] for index in batch]
                stopping = StoppingCriteriaList([_Until(self.tokenizer, until)] if until else [])
                for number, ids in zip(
                    chosen, generate_batch(self.model, encoded, chosen, settings, stopping), strict=True
                ):
                    texts[number] = _before(text_of(self.tokenizer, ids), until)
                    self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    @property
    def tokenizer_name(self) -> str:
        """The folder, by which the harness names what it keeps of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template, where `--apply_chat_template` asks for it."""
        return self.tokenizer.get_chat_template(chat_template if isinstance(chat_template, str) else None)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as one text, by the tokenizer's template."""
        text = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def _encode(self, texts: Iterable[str]) -> Sequence[list[int]]:
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def _how(self, given: dict[str, Any]) -> tuple[GenerationSettings, tuple[str, ...]]:
        """Our settings for those of a request, and where to stop. Raises ConfigError for one that we do not have."""
        wanted = dict(given)
        until, do_sample = wanted.pop("until", None) or (), wanted.pop("do_sample", False)
        if "max_gen_toks" in wanted:
            wanted["max_new_tokens"] = wanted.pop("max_gen_toks")
        ours = {field.name: wanted.pop(field.name) for field in fields(GenerationSettings) if field.name in wanted}
        if do_sample:
            ours["temperature"] = ours.get("temperature") or 1.0  # transformers' default
        else:
            ours = {name: value for name, value in ours.items() if name not in ("temperature", "top_p", "top_k")}
        if wanted:
            names = ", ".join(field.name for field in fields(GenerationSettings))
            raise ConfigError(f"generation_kwargs: {', '.join(wanted)} is not known here; there are until, {names}")
        return replace(self._settings, **ours), (until,) if isinstance(until, str) else tuple(until)


class _Until(StoppingCriteria):
    """Ends a row when the text of its new tokens has one of the strings in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, until: tuple[str, ...]) -> None:
        self._tokenizer, self._until = tokenizer, until

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """bool [B]: which rows end."""
        texts = (text_of(self._tokenizer, row) for row in input_ids[:, 1:].tolist())
        return torch.tensor([any(stop in text for stop in self._until) for text in texts], device=input_ids.device)


def _before(text: str, until: tuple[str, ...]) -> str:
    """`text` up to the first place where one of `until` stands."""
    return text[: min((place for stop in until if (place := text.find(stop)) >= 0), default=len(text))]


def main() -> int:
    """The harness's own command, which knows our model by now; returns the exit code."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except DsEncDecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
