"""The runs of the study of quality: each is done once, leaves a JSON and its losses by example, and is found again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from quality_arms import (
    ARMS,
    RANDOM_RATE,
    UNTRAINED,
    Losses,
    Study,
    Training,
    as_one_text,
    evaluate,
    without_input,
)
from quality_tasks import TASKS, Tasks
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ds_encdec.base.types import Batch
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM

SOURCE = "source, by transformers"
TOTAL_ARM = "scratch aligned"
TOTAL_MARKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all its tokens


class Runs:
    """What has been measured in `folder`: `runs/NAME.json`, `losses/NAME.MARK.npz` and, of UL2, `states/NAME.pt`."""

    def __init__(self, folder: Path, study: Study) -> None:
        self.folder, self._study, self._size = folder, study, study.size
        for name in ("runs", "losses", "states"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def result(self, name: str) -> dict[str, Any] | None:
        """The JSON of a run that is done."""
        path = self.folder / "runs" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def losses(self, name: str, mark: int) -> Losses:
        """The losses by example at a mark."""
        return Losses.load(self.folder / "losses" / f"{name}.{mark}.npz")

    def rate(self, arm: str) -> float:
        """The rate with the least loss on the short runs; where none are planned, the middle one."""
        rates = self.rates(arm)
        found = {rate: self.result(f"rate {arm} {rate:g}") for rate in rates}
        done = {rate: run["marks"][str(self._size.rate_tokens)]["all"] for rate, run in found.items() if run}
        return min(done, key=lambda rate: done[rate]) if done else rates[len(rates) // 2]

    def rates(self, arm: str) -> list[float]:
        """The rates that are tried for an arm."""
        return [rate * (RANDOM_RATE if ARMS[arm].is_random else 1) for rate in self._size.rates]

    def all(self, tasks: Tasks) -> Iterator[str]:
        """Do all runs that are not done, the most important first; yield the name of each."""
        yield self.untrained()
        if self._size.rate_tokens:
            for arm in ARMS:
                for rate in self.rates(arm):
                    yield self.trained(f"rate {arm} {rate:g}", arm, "ul2", 0, (self._size.rate_tokens,), rate)
        for seed in range(self._size.seeds):
            for arm in ARMS:
                yield self.trained(f"ul2 {arm} {seed}", arm, "ul2", seed, self._size.marks["ul2"], keeps=True)
            for task in TASKS if self._size.task_marks else ():
                for arm in ARMS:
                    yield self.tuned(task, arm, seed, tasks)
            for arm in ARMS if self._size.marks["S"] else ():
                yield self.trained(f"S {arm} {seed}", arm, "S", seed, self._size.marks["S"])

    def untrained(self) -> str:
        """Step 0 of every form with every kind of positions, of the source itself, and with the input hidden."""
        arms = {name: arm for name, arm in {**ARMS, **UNTRAINED}.items() if not arm.is_random}
        marks: dict[str, dict[str, float]] = {}

        def measure() -> dict[str, Any]:
            for name, arm in arms.items():
                model = self._study.model(arm, seed=0)
                marks[name] = self._kept(f"step0 {name}", 0, evaluate(model, arm.view, self._study.evaluation))
            source = _source_losses(self._study, model)
            marks[SOURCE] = self._kept(f"step0 {SOURCE}", 0, source)
            return {"marks": marks}

        return self._once("step0", measure)

    def trained(
        self,
        name: str,
        arm: str,
        mixture: str,
        seed: int,
        marks: tuple[int, ...],
        rate: float = 0.0,
        *,
        keeps: bool = False,
    ) -> str:
        """Train an arm on a mixture and evaluate it at each mark. `keeps`: its last weights, for the tasks."""

        def measure() -> dict[str, Any]:
            model, at = self._study.model(ARMS[arm], seed), {}
            chosen = rate or self.rate(arm)

            def at_mark(mark: int) -> None:
                at[mark] = self._kept(name, mark, evaluate(model, ARMS[arm].view, self._study.evaluation))

            Training(model, ARMS[arm], chosen).run(self._study.batches(mixture, seed), marks, at_mark)
            if keeps:
                torch.save(model.state_dict(), self.folder / "states" / f"{name}.pt")
            return {"arm": arm, "mixture": mixture, "seed": seed, "rate": chosen, "marks": at}

        return self._once(name, measure)

    def tuned(self, task: str, arm: str, seed: int, tasks: Tasks) -> str:
        """Fine-tune the arm's UL2 model of the same seed on a task."""
        name = f"{task} {arm} {seed}"

        def measure() -> dict[str, Any]:
            model, at, study = self._study.model(ARMS[arm], seed), {}, self._study
            model.load_state_dict(
                torch.load(self.folder / "states" / f"ul2 {arm} {seed}.pt", map_location=study.device)
            )
            tests = [study.collated(rows) for rows in tasks.test(task)]

            def at_mark(mark: int) -> None:
                losses = evaluate(model, ARMS[arm].view, tests)
                at[mark] = self._kept(name, mark, losses) | {"exact": losses.exact}

            batches = map(study.collated, tasks.train(task, seed))
            Training(model, ARMS[arm], self.rate(arm)).run(batches, (0, *self._size.task_marks), at_mark)
            blind = evaluate(model, without_input, tests).by_denoiser()["all"]
            facts = {"arm": arm, "task": task, "seed": seed, "rate": self.rate(arm), "input hidden": blind}
            return {**facts, "marks": at}

        return self._once(name, measure)

    def total(self) -> str:
        """Train from random weights with all tokens that the source and an arm have had together."""
        name = f"total {TOTAL_ARM}"
        tokens = self._size.source_tokens + max(self._size.marks["ul2"])
        state = self.folder / "states" / f"{name}.state.pt"
        kept = self.folder / "runs" / f"{name}.part.json"  # the marks of a run that is not done

        def measure() -> dict[str, Any]:
            training = Training(
                self._study.model(ARMS[TOTAL_ARM], 0), ARMS[TOTAL_ARM], self._size.source_rate, tokens, state
            )
            at = json.loads(kept.read_text()) if kept.exists() else {}

            def at_mark(mark: int) -> None:
                losses = evaluate(training.model, ARMS[TOTAL_ARM].view, self._study.evaluation)
                at[str(mark)] = self._kept(name, mark, losses)
                kept.write_text(json.dumps(at))

            marks = [round(share * tokens) for share in TOTAL_MARKS]
            training.run(self._study.stream("ul2", 0), marks, at_mark)
            return {"arm": TOTAL_ARM, "mixture": "ul2", "seed": 0, "rate": self._size.source_rate, "marks": at}

        return self._once(name, measure)

    def _kept(self, name: str, mark: int, losses: Losses) -> dict[str, float]:
        losses.save(self.folder / "losses" / f"{name}.{mark}.npz")
        return losses.by_denoiser()

    def _once(self, name: str, measure: Callable[[], dict[str, Any]]) -> str:
        path = self.folder / "runs" / f"{name}.json"
        if not path.exists():
            began = time.process_time()
            found = {**measure(), "cpu seconds": round(time.process_time() - began)}
            path.with_suffix(".tmp").write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".tmp").replace(path)
        return name


@torch.no_grad()
def _source_losses(study: Study, converted: Qwen3ForSeq2SeqLM) -> Losses:
    """The losses of transformers' own class on [input ; start ; target], with the sentinels' rows of `converted`."""
    model = AutoModelForCausalLM.from_pretrained(study.source, dtype=torch.float32)
    model.resize_token_embeddings(converted.shared.num_embeddings)
    model.get_input_embeddings().weight.copy_(converted.shared.weight)
    model.get_output_embeddings().weight.copy_(converted.lm_head.weight)
    return evaluate(model.to(study.device), as_one_text, study.evaluation, _losses_by_example)


def _losses_by_example(model: Any, batch: Batch) -> Tensor:
    pieces = [ids.split(batch.decoder_lengths) for ids in (batch.decoder_input_ids, batch.labels)]
    logits = [model(input_ids=ids[None]).logits[0].float() for ids in pieces[0]]
    return torch.cat(
        [cross_entropy(row, labels, reduction="none") for row, labels in zip(logits, pieces[1], strict=True)]
    )
