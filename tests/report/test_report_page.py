"""The page of one run: everything is on it, nothing leaves it, and it says what it could not read. Pages of several:
laid over each other, or the phases of a pipeline behind each other."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_page import Page
from PIL import Image
from run_folders import (
    alert,
    change_status,
    write_checkpoint,
    write_config,
    write_lines,
    write_phases,
    write_run,
    write_troubled_run,
)

from ds_encdec import cli
from ds_encdec.report.charts import COLOURS, PLANS, alert_marks
from ds_encdec.report.read_run import SMOOTHED_FROM, SMOOTHED_PART, Curve, read_run
from ds_encdec.report.write import difference, incomparable, write_report

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


def reported(run: Path) -> Page:
    return Page(write_report(run)[0])


def test_the_page_of_a_troubled_run(troubled: Path, page: Page, golden: Callable[[object], None]) -> None:
    assert sorted(page.charts) == sorted(TITLES)
    golden(page.prose.replace(str(troubled.parent), "RUNS"))
    assert all(words in page.prose for words in page.charts.values())
    assert len(page.tables["Alerts and rollbacks"]) == 201


def test_the_page_of_a_run_that_is_described_in_full(tmp_path: Path, golden: Callable[[object], None]) -> None:
    """Settings, samples, what ran and on what, a stop that is told once, a rollback and a refused one."""
    run = write_run(tmp_path / "run", only=("train/loss", "train/tokens_seen"))
    write_config(run, training__learning_rate=1e-3, infra__deepspeed_extra={"zero_optimization": {"x": 1}},
                 model__architecture={"vocab_size": 64, "hidden_size": 8})  # fmt: skip
    config = json.loads((run / "config.yaml").read_text())
    config["phases"]["full"]["save_steps"] = 7
    config["training"]["of_another_version"] = 3
    (run / "config.yaml").write_text(json.dumps(config))
    message = "stopped at step 83 by SIGINT; state saved; go on with --resume auto"
    ran = {"git_commit": "0123456789abcdef", "git_dirty": True, "parameters": 51_456}
    machine = {"device": "H200", "device_count": 8, "host_memory_bytes": 2**40, "packages": {"torch.version": "2.9"}}
    change_status(run, **ran, **machine, state="preempted", exit_code=75, reason=message)
    back = {"kind": "rollback", "step": 60, "data_step": 60, "to_step": 40, "to_data_step": 40, "number": 1}
    events = [
        alert("loss_spike", 4, 9.0, "rollback"),
        {"kind": "no_rollback", "step": 5, "data_step": 5, "message": "No rollback: there is no checkpoint"},
        alert("loss_spike", 60, 9.0, "rollback"),
        back,
        {"kind": "stop", "step": 83, "data_step": 83, "exit_code": 75, "message": message},
    ]
    write_lines(run / "ledger.jsonl", events)
    rows = [{"input": f"in <b>{step}</b>", "reference": "5", "prediction": "x " * step} for step in (10, 2000)]
    write_lines(run / "samples.jsonl", [{"step": 10, **rows[0]}, {"step": 20, **rows[0]}, {"step": 20, **rows[1]}])
    page = reported(run)
    shown = page.tables["What it generates"][2][2]
    assert (len(shown), shown[-1]) == (1501, "…")
    golden(page.prose.replace(shown, "x … (1,501 characters)"))
    assert [section.get("open") for section in page.all("details")] == ["", "", "", None]


def test_charts_are_pictures_too_where_they_are_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss", "perf/mfu"))
    for option, names in (([], set()), (["--png"], {"loss.png", "mfu.png", "compare_loss.png"})):
        assert cli.main(["report", str(run), "--compare", str(run), *option]) == 0
        pictures = {path.name: path for path in (run / "report-compared").glob("*.png")}
        assert pictures.keys() - {"compare_loss_difference.png"} == names
    with Image.open(pictures["loss.png"]) as image:
        image.verify()
        assert image.size[0] > 600


def test_the_page_stands_alone_is_small_and_its_references_lead_somewhere(page: Page) -> None:
    assert "://" not in page.source
    assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object"} == set()
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert "@import" not in page.source
    assert not re.search(r"url\((?!#)", page.source)
    assert len(page.source) < 2_000_000
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    used = set(re.findall(r"url\(#([^)]+)\)", page.source)) | {use["xlink:href"][1:] for use in page.all("use")}
    assert len(ids) == len(set(ids))
    assert used
    assert used <= set(ids)


def test_drawings_take_the_colours_of_the_page(page: Page) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", page.source, re.S))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert len(set(COLOURS.values())) == len(COLOURS), "or one could not be told from another in a drawing"
    assert {"line1", "ink", "alert", "rollback", "abandoned"} <= used <= set(COLOURS)
    styles = page.source[: page.source.index("</style>")]
    assert all(styles.count(f"--{name}: #") == 2 for name in used), "one for light pages, one for dark ones"


def test_alerts_and_rollbacks_are_marked_on_the_curves(page: Page, tmp_path: Path) -> None:
    loss, by_denoiser = re.findall(r"<svg role.*?</svg>", page.source, re.S)[:2]
    assert all(f">{name}</text>" in loss for name in ("alert", "rollback", "restart", "taken back", "smoothed"))
    assert ">alert</text>" not in by_denoiser
    run = write_run(tmp_path / "run", steps=60, every=10, only=("train/loss",))
    alerts = [("loss_spike", 20, 36.5), ("loss_spike", 20, 9.0), ("non_finite", 60, 1.0), ("data_wait", 30, 1.0)]
    write_lines(run / "ledger.jsonl", [alert(kind, step, value, "warn") for kind, step, value in alerts])
    marks, curve = alert_marks(read_run(run), PLANS["loss"]), read_run(run).curve("train/loss")
    assert dict(zip(marks.steps, marks.values, strict=True)) == {20: curve.values[1], 60: curve.values[5]}
    assert ">smoothed</text>" not in reported(run).source


def test_a_checkpoint_that_lacks_a_file_is_said_to(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (write_checkpoint(run, 90) / "trainer.json").unlink()
    write_checkpoint(run, 100)
    damaged, sound = read_run(run).checkpoints
    assert "missing, but the manifest lists it" in damaged["damage"]
    assert sound["damage"] == ""


def test_what_a_resume_tells_again_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    start = json.loads((run / "ledger.jsonl").read_text())
    before = [alert("loss_spike", step, 30.0, "warn") for step in (40, 60)]
    resumed = start | {"data_step": 50, "resumed_from": "checkpoints/step-00000050"}
    again = [alert("loss_spike", 60, 30.01, "warn"), alert("data_wait", 60, 0.5, "warn")]  # other sums on a GPU
    write_lines(run / "ledger.jsonl", [start, *before, resumed, *again])
    assert list(read_run(run).events) == [start, before[0], resumed, *again]


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


def test_a_report_is_made_without_torch_and_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss",))
    change_status(run, state="failed", exit_code=8, reason="hang")
    code = f"import sys; from ds_encdec.cli import main; main(['report', {str(run)!r}]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1] == "False", result.stderr
    first = run / "report" / "index.html"
    assert "No alerts, no rollbacks, no skipped steps." not in Page(first).text, "it has failed"
    again, _ = write_report(run, out=tmp_path / "again")
    assert again.read_bytes() == first.read_bytes()


def test_what_was_not_logged_or_cannot_be_read_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", only=("train/loss", "train/grad_norm"))
    write_lines(run / "metrics.abandoned.jsonl", [{"step": 50, "train/loss": 3.0, "rollback": "?"}])
    spoiled = {
        "metrics.jsonl": 'what\n[1]\n{"step": NaN}\n{"step": 300, "train/loss": null, "train/mfu": "x"}\n{"step": 3',
        "run.json": "}",
        "ledger.jsonl": '{"kind": ["x"], "step": 1}\n{"kind": "alert", "step": 7, "type": {}}\n'
        '{"kind": "rollback", "step": 50, "to_step": "x", "number": []}\n',
        "config.yaml": ": [",
    }
    for file, text in spoiled.items():
        with (run / file).open("a") as opened:
            opened.write(text)
    (run / "result.json").write_text("[]")
    page = reported(run)
    for note in (
        "metrics.jsonl: the last line is not complete and is left out.",
        "metrics.jsonl: 3 lines cannot be read and are left out.",
        "1 values are not finite and are gaps",
        "run.json cannot be read",
        "1 alert: 1 × {}.",
        "config.yaml: not valid YAML",
        "result.json cannot be read: it holds no JSON object.",
        "Nothing was logged for: Loss by denoiser, Evaluation loss, Generated texts, Learning rate, ",
    ):
        assert note in page.text
    assert list(page.charts) == ["Training loss, nats per token", "Gradient norm, before clipping"]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=20)
    (run / "report").write_text("")
    assert cli.main(["report", str(run)]) == 2
    (run / "metrics.jsonl").unlink()
    assert cli.main(["report", str(run)]) == 4
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty")]) == cli.main(["report", str(tmp_path / "gone")]) == 2
    said = capsys.readouterr().err
    reasons = ("choose another folder", "nothing to draw; its state is completed", "is not the folder of a run: it has")
    assert all(reason in said for reason in (*reasons, "no such folder; give the infra.output_dir of a run"))


def curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values), dtype=np.float64), np.array(values))


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=400))
def test_smoothing_stays_inside_the_values_and_keeps_gaps(values: list[float]) -> None:
    whole = curve(values)
    smooth = whole.smoothed()
    np.testing.assert_array_equal(np.isnan(smooth.values), np.isnan(whole.values))
    if len(whole.known):
        slack = 1e-6 * (1 + np.abs(whole.known).max())
        assert whole.known.min() - slack <= smooth.known.min()
        assert smooth.known.max() <= whole.known.max() + slack
    if len(whole) < SMOOTHED_FROM:
        np.testing.assert_allclose(smooth.values, whole.values, atol=slack if len(whole.known) else 0)


@pytest.mark.parametrize("num_points", [SMOOTHED_FROM, 4321])
def test_one_value_is_spread_over_a_fortieth_of_the_points(num_points: int) -> None:
    spike = curve([10.0 if step == num_points // 2 else 0.0 for step in range(num_points)]).smoothed()
    touched = np.count_nonzero(spike.values > 1e-9)
    assert max(3, num_points / SMOOTHED_PART - 2) <= touched <= num_points / SMOOTHED_PART


LOSSES = ("train/loss", "eval/loss", "train/tokens_seen")


def test_curves_over_tokens_and_what_differed_beside_what_came_out(
    tmp_path: Path, golden: Callable[[object], None]
) -> None:
    metrics = (*LOSSES, "train/grad_norm", "perf/tokens_per_sec", "train/learning_rate")
    one = write_run(tmp_path / "one", only=metrics, training__learning_rate=1e-3)
    two = write_run(tmp_path / "two", only=metrics, steps=400, seed=1)
    index, warnings = write_report(one, compare=[two], out=tmp_path / "out")
    page = Page(index)
    assert warnings == []
    golden(page.prose)
    assert next(iter(page.charts)) == "Difference of the training losses, nats"
    assert page.source.count(">tokens seen</text>") == 6


def test_runs_with_the_same_configuration_are_said_to_be(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, only=("train/loss",), seed=len(name)) for name in ("a/run", "bb/c/run")]
    own = write_report(runs[0])[0]
    before = own.read_bytes()
    page = Page(write_report(runs[0], compare=runs[1:])[0])
    assert own.read_bytes() == before, "a comparison has a page of its own"
    assert "Their configurations are the same." in page.text
    assert page.tables["What came out, and what differed"][0] == ["", "a/run", "bb/c/run"]
    assert ">tokens seen</text>" not in page.source, "a run that did not log them is drawn over steps"


def test_runs_of_different_tokenizers_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", only=LOSSES)
    two = write_run(tmp_path / "two", only=LOSSES, model__tokenizer_name_or_path="builtin")
    assert cli.main(["report", str(one), "--compare", str(two)]) == 0
    said = capsys.readouterr().err
    assert "warning: one and two differ in model.tokenizer_name_or_path: losses per token of different" in said
    assert said.partition("warning: ")[2].strip() in Page(one / "report-compared" / "index.html").text


def test_checkpoints_know_the_tokenizer_better_than_its_path(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", model__tokenizer_name_or_path="a copy")]
    files = [write_checkpoint(run, 200) / "trainer.json" for run in runs]
    names = ["one", "two"]
    assert list(incomparable([read_run(run) for run in runs], names)) == []
    files[1].write_text(json.dumps({"data": {"fingerprint": {"tokenizer": "another"}}}))
    assert [warning[:30] for warning in incomparable([read_run(run) for run in runs], names)] == [
        "one and two differ in tokenize"
    ]


def test_runs_without_a_common_loss_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    write_lines(two / "metrics.jsonl", [{"step": 1, "perf/mfu": 0.4, "train/loss": None}])
    assert cli.main(["report", str(one), "--compare", str(two)]) == 4
    assert "neither of train/loss and eval/loss was logged by both" in capsys.readouterr().err
    assert not (one / "report-compared").exists()


def test_the_difference_is_taken_at_the_same_tokens(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_lines(one / "metrics.jsonl", [{"step": s, "train/loss": 4 - s / 10 if s != 5 else None} for s in range(11)])
    write_lines(two / "metrics.jsonl", [{"step": s + 0.5, "train/loss": 4.45 - s / 10} for s in range(15)])
    found = difference(*(read_run(run).curve("train/loss") for run in (two, one)))
    assert list(found.steps) == [s + 0.5 for s in range(10)]
    np.testing.assert_allclose(found.values, 0.5)


def test_the_losses_of_all_phases_stand_behind_each_other(tmp_path: Path, golden: Callable[[object], None]) -> None:
    root = write_phases(tmp_path / "output", only=("train/loss",))
    page = Page(write_report(root)[0])
    golden(page.prose)
    assert list(page.charts) == ["Training loss, nats per token, all phases"]
    assert all(f">{name}</text>" in page.source for name in ("sanity_check", "validation", "medium"))
    reports = [link["href"] for link in page.all("a") if link["href"].endswith(".html")]
    assert reports == [f"{name}/index.html" for name in ("sanity_check", "validation", "medium")]
    assert "The gate of medium was not passed" in Page(root / "report" / "medium" / "index.html").text


def test_a_phase_that_logged_nothing_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "phases" / "sanity_check" / "metrics.jsonl", [])
    assert cli.main(["report", str(tmp_path)]) == 4
    assert "none of the phases has logged metrics" in capsys.readouterr().err
    write_run(tmp_path / "phases" / "sanity_check", only=("train/loss",))
    (tmp_path / "phases" / "validation").mkdir()
    page = Page(write_report(tmp_path, out=tmp_path / "out")[0])
    assert "! validation was begun and not judged" in page.text
    assert "validation is not the folder of a run" in page.text


def test_a_pipeline_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_phases(tmp_path / "output", only=("train/loss",))
    last = root / "phases" / "medium"
    assert cli.main(["report", str(last), "--compare", str(root)]) == 2
    assert f"{root} is the folder of a pipeline of phases" in (said := capsys.readouterr().err)
    assert f"name one of its phases, e.g. {last}." in said
