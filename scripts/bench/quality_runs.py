"""The runs of the study of quality: each is done once, leaves a JSON and its losses by example, and is found again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_arms import (
    ARMS,
    SOURCE,
    UNTRAINED,
    Losses,
    Study,
    by_denoiser,
    evaluate,
    stepper,
    train,
    without_input,
)
from quality_source import Size
from quality_text import TASKS, Task

RANDOM_RATE = 8  # times the rates of arms from a source, for those from random weights
LONG_ARMS = [name for name, arm in ARMS.items() if not arm.is_random]
TOTAL_ARMS = [name for name, arm in ARMS.items() if arm.is_random]
TOTAL_MARKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all its tokens
MIXTURES = {"ul2": (), "long": (), "S": ("data.ul2_task_weights=[0,0,0,0,1]",)}


class Results:
    """Keeps what has been measured in `folder`: `runs/NAME.json` and `losses/NAME.MARK.npz`."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size

    def result(self, name: str) -> dict[str, Any] | None:
        """The JSON of a run that is done."""
        path = self.folder / "runs" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def losses(self, name: str, mark: int | str) -> Losses:
        """The losses by example at a mark."""
        with np.load(self.folder / "losses" / f"{name}.{mark}.npz") as arrays:
            return dict(arrays)

    def rates(self, arm: str) -> dict[float, float | None]:
        """The rates that are tried for an arm, and the loss of each on its short run."""
        rates = [rate * (RANDOM_RATE if ARMS[arm].is_random else 1) for rate in self.size.rates]
        runs = {rate: self.result(f"rate {arm} {rate:g}") for rate in rates}
        return {rate: run and run["marks"][str(self.size.rate_tokens)]["all"] for rate, run in runs.items()}

    def rate(self, arm: str) -> float:
        """The rate with the least loss on the short runs."""
        rates = self.rates(arm)
        return min(rates, key=lambda rate: rates[rate])


class Runs(Results):
    """The runs themselves. Beside the results stand `states/NAME.pt`: weights that tasks start from."""

    def __init__(self, folder: Path, study: Study) -> None:
        super().__init__(folder, study.size)
        self._study = study
        for name in ("runs", "losses", "states"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def all(self) -> Iterator[str]:
        """Do all runs that are not done, the most important first; yield the name of each."""
        yield self.untrained()
        for arm in ARMS:
            for rate in self.rates(arm):
                yield self.trained(f"rate {arm} {rate:g}", arm, "ul2", 0, (self.size.rate_tokens,), rate)
        for seed in range(self.size.seeds):
            for arm in ARMS:
                yield self.trained(f"ul2 {arm} {seed}", arm, "ul2", seed, self.size.marks["ul2"], self.rate(arm))
            for task in TASKS if (self.folder / "text" / "pairs.jsonl").stat().st_size else TASKS[1:]:
                for arm in ARMS:
                    yield self.tuned(task, arm, seed)
            for arm in ARMS if self.size.marks["S"] else ():
                yield self.trained(f"S {arm} {seed}", arm, "S", seed, self.size.marks["S"], self.rate(arm))
        for arm in LONG_ARMS if self.size.marks["long"] else ():
            yield self.trained(f"long {arm} 0", arm, "long", 0, self.size.marks["long"], self.rate(arm))
        for arm in TOTAL_ARMS:
            yield self.total(arm)

    def untrained(self) -> str:
        """Step 0 of every form with every kind of positions, of the source itself, and with the input hidden."""

        def measure() -> dict[str, Any]:
            marks = {}
            for name, arm in UNTRAINED.items():
                model = self._study.model(arm, seed=0)
                marks[name] = self._kept(f"step0 {name}", 0, evaluate(model, arm.view, self._study.evaluation))
            marks[SOURCE] = self._kept(f"step0 {SOURCE}", 0, self._study.source_losses(model))
            return {"marks": marks}

        return self._once("step0", measure)

    def trained(self, name: str, arm: str, mixture: str, seed: int, marks: tuple[int, ...], rate: float) -> str:
        """Train an arm on a mixture and evaluate it at each mark."""

        def measure() -> dict[str, Any]:
            model, at, view = self._study.model(ARMS[arm], seed), {}, ARMS[arm].view

            def at_mark(mark: int) -> None:
                at[mark] = self._kept(name, mark, evaluate(model, view, self._study.evaluation))

            batches = self._study.batches(seed, *MIXTURES[mixture])
            steps = stepper(model, ARMS[arm])
            train(model, ARMS[arm], steps, lambda: rate * steps.warm_up(), batches, marks, at_mark)
            if name.startswith("ul2"):
                torch.save(model.state_dict(), self.folder / "states" / f"{name}.pt")
            return {"arm": arm, "mixture": mixture, "seed": seed, "rate": rate, "marks": at}

        return self._once(name, measure)

    def tuned(self, task: str, arm: str, seed: int) -> str:
        """Fine-tune the arm's UL2 model of the same seed on a task."""
        name, study = f"{task} {arm} {seed}", self._study

        def measure() -> dict[str, Any]:
            model, at, view = study.model(ARMS[arm], seed), {}, ARMS[arm].view
            start = self.folder / "states" / f"ul2 {arm} {seed}.pt"
            model.load_state_dict(torch.load(start, map_location=study.device))
            texts = self.folder / "text"
            examples = Task(task, texts, study.tokenizer, study.vocabulary.eos_id, self.size.task_examples)
            tests = [study.collated(rows) for rows in examples.test()]

            def at_mark(mark: int) -> None:
                losses = evaluate(model, view, tests)
                at[mark] = self._kept(name, mark, losses) | {"exact": float(losses["exact"])}

            batches, marks = map(study.collated, examples.train(seed)), (0, *self.size.task_marks)
            rate, steps = self.rate(arm), stepper(model, ARMS[arm])
            train(model, ARMS[arm], steps, lambda: rate * steps.warm_up(), batches, marks, at_mark)
            hidden = by_denoiser(evaluate(model, without_input, tests))["all"]
            return {"arm": arm, "task": task, "seed": seed, "rate": rate, "input hidden": hidden, "marks": at}

        return self._once(name, measure)

    def total(self, arm: str) -> str:
        """Train from random weights with the source's recipe, on the texts of the source and of the arms, with all
        tokens that the source and an arm have had together. Goes on where it ended."""
        tokens, rate = self.size.source_tokens + max(self.size.marks["ul2"]), self.size.source_rate
        name, view = f"total {arm}", ARMS[arm].view
        part = self.folder / "runs" / f"{name}.part.json"

        def measure() -> dict[str, Any]:
            model, at = self._study.model(ARMS[arm], 0), (self.result(f"{name}.part") or {"marks": {}})["marks"]
            steps = stepper(model, ARMS[arm], self.folder / "states" / f"{name}.state.pt")

            def at_mark(mark: int) -> None:
                at[str(mark)] = self._kept(name, mark, evaluate(model, view, self._study.evaluation))
                part.write_text(json.dumps({"marks": at}))

            files = ",".join(str(self.folder / "text" / f"{role}.jsonl") for role in ("source", "ul2"))
            batches = self._study.batches(0, f"data.data_files=[{files}]")
            marks = [mark for mark in (round(share * tokens) for share in TOTAL_MARKS) if str(mark) not in at]
            train(model, ARMS[arm], steps, lambda: rate * steps.cosine(steps.seen / tokens), batches, marks, at_mark)
            return {"arm": arm, "rate": rate, "marks": at}

        self._once(name, measure)
        part.unlink(missing_ok=True)
        return name

    def _kept(self, name: str, mark: int, losses: Losses) -> dict[str, float]:
        np.savez(self.folder / "losses" / f"{name}.{mark}.npz", **losses)
        return by_denoiser(losses)

    def _once(self, name: str, measure: Callable[[], dict[str, Any]]) -> str:
        path = self.folder / "runs" / f"{name}.json"
        if not path.exists():
            began = time.process_time()
            found = {**measure(), "cpu seconds": round(time.process_time() - began)}
            path.with_suffix(".tmp").write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".tmp").replace(path)
            print(name, {mark: losses.get("all") for mark, losses in found["marks"].items()}, flush=True)
        return name
