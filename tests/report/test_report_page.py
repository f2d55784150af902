"""The page of one run: everything is on it, nothing leaves it, and it says what it could not read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_page import Page
from PIL import Image
from run_folders import (
    TIME,
    alert,
    write_checkpoint,
    write_config,
    write_lines,
    write_run,
    write_troubled_run,
)

from ds_encdec import cli
from ds_encdec.report import write
from ds_encdec.report.charts import COLOURS, PLANS, alert_marks, charts_of
from ds_encdec.report.page import flat, number
from ds_encdec.report.read_run import read_run
from ds_encdec.report.write import write_report

TITLES = [plan.heading for plan in PLANS.values()]


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_troubled_run(tmp_path_factory.mktemp("runs") / "long run", steps=100_000)
    write_checkpoint(run, 90_000)
    write_checkpoint(run, 100_000)
    write_report(run)
    return run


@pytest.fixture(scope="module")
def page(troubled: Path) -> Page:
    return Page(troubled / "report" / "index.html")


def test_every_chart_is_there_with_key_figures_in_words(page: Page) -> None:
    assert sorted(page.charts) == sorted(TITLES)
    assert page.charts[TITLES[0]].startswith(
        "first 11.5, last 3.098, lowest 2.878 at step 78,930, highest 12.5 at step "
    )
    assert "Nothing was logged" not in page.text


def test_charts_are_pictures_too_where_they_are_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss", "perf/mfu"))
    for option, names in (([], set()), (["--png"], {"loss.png", "mfu.png"})):
        assert cli.main(["report", str(run), "--compare", str(run), *option]) == 0
        pictures = {path.name: path for path in (run / "report-compared").glob("*.png")}
        assert {name for name in pictures if not name.startswith("compare_")} == names
        assert len(pictures) == 0 or "compare_loss.png" in pictures
    for path in pictures.values():
        with Image.open(path) as image:
            image.verify()
            assert image.size[0] > 600


def test_the_page_stands_alone_and_is_small(troubled: Path, page: Page) -> None:
    assert "://" not in page.source
    assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object"} == set()
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert "@import" not in page.source
    assert not re.search(r"url\((?!#)", page.source)
    assert len(page.source) < 2_000_000


def test_ids_are_unique_and_references_lead_to_them(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    used = set(re.findall(r"url\(#([^)]+)\)", page.source)) | {use["xlink:href"][1:] for use in page.all("use")}
    assert len(ids) == len(set(ids))
    assert used
    assert used <= set(ids)


def test_drawings_take_the_colours_of_the_page(page: Page) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", page.source, re.S))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert used <= set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS), "or one could not be told from another in a drawing"
    assert {"line1", "ink", "alert", "rollback", "abandoned"} <= used
    styles = page.source[: page.source.index("</style>")]
    for name in used:
        assert styles.count(f"--{name}: #") == 2, "one for light pages, one for dark ones"


def test_the_verdict_tells_what_happened(page: Page) -> None:
    assert "Failed after step 100,000 of 100,000, exit code 7" in page.text
    assert "3 rollbacks, which took back 14,000 steps." in page.text
    assert "303 alerts: 36 × loss_spike" in page.text
    assert "Stopped at step 100,000: diverged after 3 rollbacks" in page.text
    assert "values are not finite and are gaps in the curves: train/grad_norm, train/loss." in page.text


def test_a_refused_rollback_is_not_shown_as_one(tmp_path: Path) -> None:
    """Two alerts of one interval are refused together; the third is answered, and the last only warned of."""
    run = write_run(tmp_path / "run", only=("train/loss",))
    refusal = {"kind": "no_rollback", "step": 5, "data_step": 5, "message": "No rollback: there is no checkpoint"}
    rollback = {"kind": "rollback", "step": 60, "data_step": 60, "to_step": 40, "to_data_step": 40, "number": 1}
    write_lines(
        run / "ledger.jsonl",
        [
            alert("loss_spike", 3, 9.0, "rollback"),
            alert("loss_spike", 4, 9.0, "rollback"),
            refusal,
            alert("loss_spike", 60, 9.0, "rollback"),
            rollback,
            alert("loss_spike", 70, 9.0, "warn"),
        ],
    )
    page = Page(write_report(run)[0])
    refused = "no rollback: no checkpoint old enough"
    assert [(row[1], row[3][:37]) for row in reversed(page.tables["Alerts and rollbacks"][1:])] == [
        ("loss_spike", refused),
        ("loss_spike", refused),
        ("rollback refused", "training went on"),
        ("loss_spike", "rollback"),
        ("rollback 1", "back to step 40; the data between ste"),
        ("loss_spike", "warn"),
    ]
    assert "! 1 rollback refused: no checkpoint was old enough." in page.text
    assert "! 1 rollback, which took back 20 steps." in page.text


def test_a_run_that_failed_is_not_said_to_be_without_trouble(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss",))
    quiet = "No alerts, no rollbacks, no skipped steps."
    assert quiet in Page(write_report(run)[0]).text
    status = json.loads((run / "run.json").read_text()) | {"state": "failed", "exit_code": 8, "reason": "hang"}
    (run / "run.json").write_text(json.dumps(status))
    assert quiet not in Page(write_report(run)[0]).text


def test_nested_values_are_named_level_by_level_and_their_keys_keep_their_dots() -> None:
    values = {"a_b": {"dotted.key": 1, "used_bytes": 2**30, "none": None}, "torch.version": "2.9"}
    assert list(flat(values)) == [("a b dotted.key", "1"), ("a b used", "1 GiB"), ("torch.version", "2.9")]


def test_events_are_listed_newest_first_with_what_was_done(page: Page) -> None:
    head, *rows = page.tables["Alerts and rollbacks"]
    assert head == ["step", "event", "what", "done about it", "time"]
    assert len(rows) == 200
    assert [row[1] for row in rows[:2]] == ["stop", "restart"]
    assert "108 older events in ledger.jsonl." in page.text


def test_alerts_and_rollbacks_are_marked_on_the_curves(page: Page) -> None:
    loss, denoisers = (
        re.search(rf'<svg role="img" aria-label="{title}.*?</svg>', page.source, re.S) for title in TITLES[:2]
    )
    assert loss is not None
    assert denoisers is not None
    for legend in ("alert", "rollback", "restart", "taken back", "smoothed", "as logged"):
        assert f">{legend}</text>" in loss[0]
    assert ">alert</text>" not in denoisers[0]


@pytest.mark.parametrize(
    ("steps", "every", "ticks"), [(20, 5, [5, 10, 15, 20]), (60, 10, [20, 40, 60]), (30, 3, [5, 10, 15, 20, 25, 30])]
)
def test_steps_are_named_in_round_numbers(tmp_path: Path, steps: int, every: int, ticks: list[int]) -> None:
    run = write_run(tmp_path / "run", steps=steps, every=every, only=("train/loss",))
    (chart,), _ = charts_of(read_run(run))
    axis = chart.svg.split("matplotlib.axis_2")[0]
    assert [int(words) for words in re.findall(r">(\d+)</text>", axis)] == ticks


def test_a_short_run_is_drawn_as_it_was_logged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60, every=10, only=("train/loss",))
    source = Page(write_report(run)[0]).source
    assert ">Training loss, nats per token</text>" in source
    assert ">loss</text>" not in source, "the legend would repeat the title"
    assert ">smoothed</text>" not in source


def test_checkpoints_are_compared_with_their_manifests(troubled: Path, page: Page) -> None:
    assert [row[:2] for row in page.tables["Checkpoints"]] == [["step", "is"], ["100,000", "latest"], ["90,000", ""]]
    assert page.tables["Checkpoints"][1][2:5] == ["2026-11-02T09:30:00+00:00", "stop", "3.25"]
    damaged = read_run(troubled)
    (troubled / "checkpoints" / "step-00090000" / "trainer.json").rename(troubled / "trainer.json")
    try:
        damaged = read_run(troubled)
    finally:
        (troubled / "trainer.json").rename(troubled / "checkpoints" / "step-00090000" / "trainer.json")
    assert "missing, but the manifest lists it" in damaged.checkpoints[0]["damage"]
    assert damaged.checkpoints[1]["damage"] == ""


def test_alerts_are_marked_at_what_they_saw_and_none_hides_another(tmp_path: Path) -> None:
    """Four skipped steps behind step 20, all at norms that no line of metrics has."""
    run = write_run(tmp_path / "run", only=("train/loss", "train/grad_norm"))
    skipped = [alert("grad_explosion", 20, norm, "skip_step") for norm in (12.0, 36.5, 9.0, 25.0)]
    skipped = [entry | {"data_step": 21 + index} for index, entry in enumerate(skipped)]
    write_lines(run / "ledger.jsonl", [*skipped, alert("grad_explosion", 103, 10.265, "warn")])
    assert alert_marks(read_run(run), PLANS["grad_norm"]) == [(20, 36.5, 4), (103, 10.265, 1)]
    page = Page(write_report(run)[0])
    assert "highest 36.5 at step 20 (alert)" in page.charts[PLANS["grad_norm"].heading]
    assert "(alert)" not in page.charts[PLANS["loss"].heading]
    assert page.source.count(">×4</text>") == 1


def test_what_a_resume_tells_again_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    start = json.loads((run / "ledger.jsonl").read_text())
    before = [alert("loss_spike", step, 30.0, "warn") for step in (40, 60)]
    resumed = start | {"data_step": 50, "resumed_from": "checkpoints/step-00000050"}
    again = [alert("loss_spike", 60, 30.01, "warn"), alert("data_wait", 60, 0.5, "warn")]  # other sums on a GPU
    write_lines(run / "ledger.jsonl", [start, *before, resumed, *again])
    assert list(read_run(run).events) == [start, before[0], resumed, *again]


def test_the_time_of_steps_before_a_start_from_another_run_is_not_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=())
    write_lines(run / "metrics.jsonl", [{"step": step, "perf/step_time_s": 0.5} for step in (210, 220)])
    write_lines(run / "ledger.jsonl", [{"time": TIME, "kind": "start", "step": 200, "resumed_from": "else/step-200"}])
    assert Page(write_report(run)[0]).facts["time in training steps"] == "10 s"


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert('$x')</script>&\"--></style>"
    run = write_run(tmp_path / "$run<b>", only=("train/loss",), data__dataset_name=attack)
    write_lines(run / "ledger.jsonl", [alert(attack, 50, 9.0, attack) | {"message": attack}])
    status = {"state": attack, "reason": attack, "host": {attack: attack}}
    (run / "run.json").write_text(json.dumps(status))
    verdict = {"phase": attack, "passed": False, "checks": [{"name": attack, "passed": False, "message": attack}]}
    (run / "result.json").write_text(json.dumps(verdict))
    page = Page(write_report(run, compare=[write_run(tmp_path / "other$<i>", only=("train/loss",))])[0])
    assert page.all("script") == page.all("i") == page.all("b") == []
    assert page.text.count(attack) >= 6
    assert "other$<i>" in "".join(label for label in page.charts.values())
    assert ">other$&lt;i&gt;</text>" in page.source


def test_a_report_is_made_without_torch(tmp_path: Path) -> None:
    """It is read where people sit, which need not be where they train."""
    run = write_run(tmp_path / "run", only=("train/loss",))
    code = f"import sys; from ds_encdec.cli import main; main(['report', {str(run)!r}]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss", "perf/mfu"))
    write_report(run, out=tmp_path / "one")
    write_report(run, out=tmp_path / "two")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["index.html"]
    assert (tmp_path / "one" / "index.html").read_bytes() == (tmp_path / "two" / "index.html").read_bytes()


def test_what_it_generates_stands_beside_what_it_should(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "What it generates" not in Page(write_report(run)[0]).text
    rows = [{"input": f"in <b>{step}</b>", "reference": "5", "prediction": "x " * step} for step in (10, 2000)]
    rows[1]["reference"] = "5" + "\n" * 200 + "end"
    write_lines(run / "samples.jsonl", [{"step": 10, **rows[0]}, {"step": 20, **rows[0]}, {"step": 20, **rows[1]}])
    page = Page(write_report(run)[0])
    header, *shown = page.tables["What it generates"]
    assert header == ["input", "reference", "prediction"]
    assert [row[:2] for row in shown] == [["in <b>10</b>", "5"], ["in <b>2000</b>", "5\n[200 line breaks]\nend"]]
    assert "at step 20;" in page.text
    assert (len(shown[1][2]), shown[1][2][-1]) == (1501, "…")


def test_charts_without_values_are_left_out_and_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_lines(run / "metrics.jsonl", [{"step": 1, "train/loss": 4.0, "perf/mfu": None}])
    page = Page(write_report(run)[0])
    assert list(page.charts) == ["Training loss, nats per token"]
    assert "Nothing was logged for: Loss by denoiser, Evaluation loss, Generated texts, Gradient norm, " in page.text
    assert "config.yaml: no such file." in page.text


def test_configuration_that_is_not_the_default(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    sizes = {"vocab_size": 64, "hidden_size": 8}
    write_config(run, training__learning_rate=1e-3, infra__deepspeed_extra={"zero_optimization": {"x": 1}},
                 model__architecture=sizes)  # fmt: skip
    config = json.loads((run / "config.yaml").read_text())
    config["phases"]["full"]["save_steps"] = 7
    config["training"]["of_another_version"] = 3
    (run / "config.yaml").write_text(json.dumps(config))
    page = Page(write_report(run)[0])
    changed = {name.split(": ")[1]: rows[1:] for name, rows in page.tables.items() if name.startswith("Configuration")}
    assert changed == {
        "model": [["model.architecture.vocab_size", "64", "–"], ["model.architecture.hidden_size", "8", "–"]],
        "training": [["training.learning_rate", "0.001", "0.0002"], ["training.of_another_version", "3", "–"]],
        "infra": [["infra.deepspeed_extra.zero_optimization.x", "1", "–"]],
        "phases": [["phases.full.save_steps", "7", "null"]],
    }
    assert [section.get("open") for section in page.all("details")] == ["", "", "", None]


UNREADABLE = [
    ("metrics.jsonl", '{"step": 300, "train/lo', "metrics.jsonl: the last line is not complete and is left out."),
    ("metrics.jsonl", "what\n[1]\n", "metrics.jsonl: 2 lines cannot be read and are left out."),
    ("metrics.jsonl", '{"step": NaN, "train/loss": 3}\n', "1 lines cannot be read"),
    ("metrics.jsonl", '{"step": 300, "train/loss": null}\n', "1 values are not finite and are gaps"),
    ("metrics.jsonl", '{"step": 300, "train/loss": NaN, "train/grad_norm": "x"}\n', "1 values are not finite"),
    ("run.json", "}", "run.json cannot be read"),
    ("ledger.jsonl", '{"kind": ["x"], "step": 1}\n{"kind": "alert", "step": 7, "type": {}}\n', "1 alert: 1 × {}."),
    ("config.yaml", ": [", "config.yaml: not valid YAML"),
    ("result.json", "[]", "result.json cannot be read: it holds no JSON object."),
]


@pytest.mark.parametrize(("file", "text", "note"), UNREADABLE)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, file: str, text: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "charts_of", lambda *_: ([], []))  # which take most of the time
    run = write_run(tmp_path / "run")
    with (run / file).open("a") as opened:
        opened.write(text)
    assert note in Page(write_report(run)[0]).text


def test_a_run_with_much_that_cannot_be_read_still_has_its_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss", "train/grad_norm"))
    for file, text, _ in reversed(UNREADABLE):
        with (run / file).open("a") as opened:
            opened.write(text)
    rollback = {"kind": "rollback", "step": 50, "to_step": "x", "number": []}
    write_lines(run / "metrics.abandoned.jsonl", [{"step": 50, "train/loss": 3.0, "rollback": "?"}])
    with (run / "ledger.jsonl").open("a") as opened:
        opened.write(json.dumps(rollback) + "\n")
    assert len(Page(write_report(run)[0]).charts) == 2


def remove(name: str) -> Any:
    return lambda run: (run / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda run: run.rename(run.with_name("gone")), 2, "no such folder; give the infra.output_dir of a run"),
        (lambda run: [path.unlink() for path in run.iterdir()], 2, "is not the folder of a run: it has none of"),
        (remove("metrics.jsonl"), 4, "no line of metrics, so there is nothing to draw; its state is completed"),
        (lambda run: (run / "metrics.jsonl").write_text(""), 4, "no line of metrics"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "tr'), 4, "no line of metrics"),
        (lambda run: (run / "report").write_text(""), 2, "choose another folder"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, code: int, message: str
) -> None:
    run = write_run(tmp_path / "run", steps=20)
    spoil(run)
    assert cli.main(["report", str(run)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("threshold", "drawn"), [(2.0, True), (50.0, False)])
def test_a_limit_far_above_the_data_does_not_flatten_the_curve(tmp_path: Path, threshold: float, drawn: bool) -> None:
    run = write_run(tmp_path / "run", only=("train/grad_norm",))
    write_config(run, monitor__grad_norm_threshold=threshold)
    (chart,), _ = charts_of(read_run(run))
    assert (f">alert above {threshold:g}</text>" in chart.svg) == drawn


def test_charts_say_what_their_lines_are(tmp_path: Path) -> None:
    """When a line crossed is an alert, and that a run without a GPU has all its memory on the host."""
    names = ("health/slowest_rank_ratio", "mem/peak_bytes", "mem/host_bytes")
    run = write_run(tmp_path / "run", only=names)
    write_config(run, monitor__straggler_threshold=1.1)
    memory, slowest = charts_of(read_run(run))[0]
    assert ">alert above 1.1, 3 times in a row</text>" in slowest.svg
    assert memory.caption.startswith("last host, highest so far 61.2, host ")
    with_gpu = write_run(tmp_path / "gpu", only=(*names, "mem/device_bytes"))
    assert "last peak 61.2, host " in charts_of(read_run(with_gpu))[0][0].caption


def test_a_stop_is_told_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss",))
    message = "stopped at step 83 by SIGINT; state saved; go on with --resume auto"
    lines = [{"kind": "stop", "step": 83, "data_step": 83, "exit_code": 75, "message": message}]
    write_lines(run / "ledger.jsonl", lines)
    assert "! Stopped at step 83: by SIGINT; state saved" in (text := Page(write_report(run)[0]).text)
    assert text.count("--resume auto") == 1  # in the table of events
    status = json.loads((run / "run.json").read_text()) | {"state": "preempted", "reason": message, "exit_code": 75}
    (run / "run.json").write_text(json.dumps(status))
    assert "can be resumed: by SIGINT; state saved" in (text := Page(write_report(run)[0]).text)
    assert "83: stopped" not in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", "–"),
        (0, "", "0"),
        (3.333e-5, "", "3.333×10⁻⁵"),
        (0.02812, "s", "0.02812 s"),
        (41.1449, "%", "41.14%"),
        (409508.2, "tokens/s", "409,508 tokens/s"),
        ("odd", "", "odd"),
    ],
)
def test_numbers_have_one_form(value: object, unit: str, text: str) -> None:
    assert number(value, unit) == text


def test_the_numbers_of_an_axis_are_written_in_one_way(tmp_path: Path) -> None:
    """A learning rate of 0.001 stands above ones that are written as powers of ten."""
    run = write_run(tmp_path / "run", only=("train/loss",))
    lines = [{"step": step, "train/learning_rate": 1e-5 * step} for step in range(1, 101)]
    write_lines(run / "metrics.jsonl", lines)
    source = Page(write_report(run)[0]).source
    chart = source[source.index('aria-label="Learning rate') :].partition("</svg>")[0]
    labels = re.findall(r">([^<>]+)</text>", chart)
    assert {"0", "2×10⁻⁴", "1×10⁻³"} <= set(labels), labels
    assert "0.001" not in labels


def test_what_ran_and_on_what_is_among_the_facts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss", "train/tokens_seen"))
    status = json.loads((run / "run.json").read_text())
    status |= {
        "git_commit": "0123456789abcdef",
        "git_dirty": True,
        "parameters": 51_456,
        "device": "H200",
        "device_count": 8,
        "host_memory_bytes": 2**40,
    }
    (run / "run.json").write_text(json.dumps(status))
    facts = Page(write_report(run)[0]).facts
    assert facts["git commit"] == "0123456789ab, changed since"
    assert (facts["device"], facts["host memory"]) == ("8 × H200", "1,024 GiB")
    assert facts["last eval loss"] == "–"
    assert facts["git dirty"] == "yes"
    assert "examples that were too long" not in facts  # nothing was counted
    assert (facts["parameters"], facts["tokens per parameter"]) == ("51,456", "1,943")
