"""lm-evaluation-harness, as it is, on an exported model and local tasks, against values computed without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_export import WORDS, export_tiny

from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.tokenizer.load import pretrained_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}, cache_dir: FOLDER/cache}
test_split: test
doc_to_text: "{{question}}"
target_delimiter: ""
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 1
metric_list: [{metric: acc}]
"""
ANSWER = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["UNTIL"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
HARNESS = """
import json, sys
from pathlib import Path
import lm_eval
from lm_eval.tasks import TaskManager
tasks = TaskManager(include_path=sys.argv[2], include_defaults=False)  # not its own 14,000
named = ["tiny_choice", "tiny_answer"]
found = lm_eval.simple_evaluate("hf", sys.argv[1], tasks=named, task_manager=tasks, device="cpu", batch_size=1)
kept = {name: found[name] for name in ("results", "samples")}
Path(sys.argv[2], "found.json").write_text(json.dumps(kept, default=str))
"""


def test_the_harness_judges_an_export_as_it_is(tmp_path: Path) -> None:
    folder = export_tiny(tmp_path / "model")
    tokenizer, model = pretrained_tokenizer(str(folder), field=""), Qwen3ForSeq2SeqLM.from_pretrained(folder).eval()
    places = ((3, 4), (20, 9), (40, 1), (0, 6), (9, 2))
    questions = [" ".join(WORDS[start : start + length]) for start, length in places]

    @torch.no_grad()
    def likelihood(question: str, answer: str) -> float:
        ids = torch.tensor([tokenizer.encode(answer)])
        start = torch.nn.functional.pad(ids[:, :-1], (1, 0))
        logits = model(torch.tensor([tokenizer.encode(question)]), decoder_input_ids=start).logits
        return float(logits.log_softmax(-1).gather(-1, ids[..., None]).sum())

    def answer(question: str) -> str:
        ids = torch.tensor([tokenizer.encode(question)])
        # The harness counts the context as if it stood in the decoder: max_gen_toks is exceeded by its length.
        return tokenizer.decode(model.generate(ids, max_length=ids.shape[1] + 12)[0], skip_special_tokens=True)

    until = " " + answer(questions[1]).split()[3]
    answers = [answer(question).split(until)[0] for question in questions]
    choices = [f"{WORDS[7]} {WORDS[8]}", WORDS[3], f"{WORDS[30]} {WORDS[1]} {WORDS[2]}"]
    pairs = zip(questions, ["something else", *answers[1:]], strict=True)
    rows = [{"question": question, "choices": choices, "answer": answer} for question, answer in pairs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task, lines in {"tiny_choice": CHOICE, "tiny_answer": ANSWER}.items():
        filled = (COMMON + lines).replace("FOLDER", str(tmp_path)).replace("UNTIL", until)
        (tmp_path / f"{task}.yaml").write_text(f"task: {task}{filled}")

    # A process of its own: transformers keeps the code of loaded folders, by their last names, in each one.
    arguments = f"pretrained={folder},trust_remote_code=True,backend=seq2seq,dtype=float32"
    command = [sys.executable, "-c", HARNESS, arguments, str(tmp_path)]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    results, samples = found["results"], found["samples"]
    best = [max(range(3), key=lambda n: likelihood(row["question"], row["choices"][n])) for row in rows]
    assert results["tiny_choice"]["acc,none"] == best.count(1) / 5
    for sample in samples["tiny_choice"]:
        for (score, _), choice in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            assert float(score) == pytest.approx(likelihood(sample["doc"]["question"], choice), abs=1e-4)
    assert {row["doc_id"]: row["resps"][0][0] for row in samples["tiny_answer"]} == dict(enumerate(answers))
    assert results["tiny_answer"]["exact_match,none"] == 4 / 5
