"""The harness on local tasks, against values computed without it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tiny_export import WORDS, export_tiny

from ds_encdec.evaluate.harness import EncoderDecoderLM
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.load import pretrained_tokenizer
from ds_encdec.types import ConfigError

COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}, cache_dir: FOLDER/cache}
test_split: test
doc_to_text: "{{question}}"
target_delimiter: ""
"""
CHOICE = (
    COMMON
    + """
task: tiny_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
)
ANSWER = (
    COMMON
    + """
task: tiny_answer
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["UNTIL"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
)


def test_local_tasks_in_the_harness(tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "model")
    tokenizer, model = pretrained_tokenizer(str(folder), field=""), Qwen3ForSeq2SeqLM.from_pretrained(folder).eval()
    questions = [
        " ".join(WORDS[start : start + length]) for start, length in ((3, 4), (20, 9), (40, 1), (0, 6), (9, 2))
    ]

    @torch.no_grad()
    def likelihood(question: str, answer: str) -> float:
        ids = torch.tensor([tokenizer.encode(answer)])
        start = torch.nn.functional.pad(ids[:, :-1], (1, 0))
        logits = model(torch.tensor([tokenizer.encode(question)]), decoder_input_ids=start).logits
        return float(logits.log_softmax(-1).gather(-1, ids[..., None]).sum())

    def answer(question: str) -> str:
        ids = model.generate(torch.tensor([tokenizer.encode(question)]), max_new_tokens=12)
        return tokenizer.decode([token for token in ids[0].tolist() if token > 1])  # sentinels stay

    choices = [[f"{WORDS[7]} {WORDS[8]}", WORDS[number], f"{WORDS[30]} {WORDS[1]} {WORDS[2]}"] for number in range(5)]
    until = " " + answer(questions[1]).split()[3]
    answers = [answer(question).split(until)[0] for question in questions]
    rows: list[dict[str, Any]] = [
        {"question": question, "choices": some, "label": 1, "answer": text if number else "something else"}
        for number, (question, some, text) in enumerate(zip(questions, choices, answers, strict=True))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task, text in (("choice", CHOICE), ("answer", ANSWER)):
        filled = text.replace("FOLDER", str(tmp_path)).replace("UNTIL", until)
        (tmp_path / f"{task}.yaml").write_text(filled)

    # Without its own tasks, of which it would read all 14,000 first.
    local = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(
        "ds_encdec", f"model={folder},dtype=float32", tasks=["tiny_choice", "tiny_answer"], task_manager=local
    )
    results, samples = found["results"], found["samples"]
    best = [max(range(3), key=lambda n: likelihood(row["question"], row["choices"][n])) for row in rows]
    assert results["tiny_choice"]["acc,none"] == best.count(1) / 5
    for sample in samples["tiny_choice"]:
        for (score, _), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            assert float(score) == pytest.approx(likelihood(sample["doc"]["question"], choice), abs=1e-4)
    found_answers = {row["doc_id"]: row["resps"][0][0] for row in samples["tiny_answer"]}
    assert [found_answers[number] for number in range(5)] == answers
    assert results["tiny_answer"]["exact_match,none"] == 4 / 5

    lm = EncoderDecoderLM(str(folder))
    with pytest.raises(ConfigError, match="task tiny_rolling: it asks for the likelihood of whole texts"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a text",), 0, ("tiny_rolling", 0, 1))])
    odd = {"until": [], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "penalty": 3}
    with pytest.raises(ConfigError, match="generation_kwargs: penalty is not known here"):
        lm.generate_until([Instance("generate_until", {}, ("word3", odd), 0)])
    del odd["penalty"]
    both = [Instance("generate_until", {}, ("word3", how), 0) for how in (odd, {"until": "word", "max_gen_toks": 3})]
    sampled, cut = lm.generate_until(both)
    assert sampled
    assert cut == ""


def test_without_the_package_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "ds_encdec.evaluate.harness")
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("ds_encdec.evaluate.harness", run_name="__main__")
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith("pip install 'ds_encdec[lm-eval]'\n")
