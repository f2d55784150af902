"""What `ds-encdec compare` says of folders, whatever is in them; real runs: tests/faults/test_tokens.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_encdec import cli

ENTRY = {"kind": "tokens", "step": 2, "data_step": 2, "first": 1, "ranks": 2}
ENTRY |= {"steps": "000000aa000000ab 000000bb000000bc"}


def folder(
    path: Path,
    *,
    ledger: Any = (ENTRY,),
    losses: tuple[Any, ...] = (3.5, 3.25),
) -> str:
    path.mkdir()
    start = {"kind": "start", "step": 0, "data_step": 0, "world_size": 8}
    lines = [{"step": 2 * n, "train/loss": loss, "train/grad_norm": 1.0} for n, loss in enumerate(losses, start=1)]
    for name, rows in (("ledger", [start, *ledger]), ("metrics", lines)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_it_names_each_first_difference_and_what_one_run_has_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = folder(tmp_path / "1")
    wrong = ENTRY | {"steps": "000000aa000000ab 000000bc000000c0", "ranks": 1}  # 1 more, and 4 more
    more = ENTRY | {"data_step": 3, "first": 3, "steps": "000000cc000000cc", "ranks": 4}  # the newest start's
    other = folder(tmp_path / "2", ledger=(wrong, more), losses=(3.5, None, 3.0))
    assert cli.main(["compare", one, other]) == 10
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"Data step 2 is the first with other tokens, in lane 3 alone (rank 1 in {one}, rank 0 in {other}).",
        f"Step 4 is the first with other metrics: train/loss is 3.25 in {one}, None in {other}.",
        f"Only {other} has the tokens of 1 step, from 3 to 3.",
        f"Only {other} has the metrics of 1 step, from 6 to 6.",
    ]
    assert "error: the runs are not equal" in said.err


def test_it_says_that_no_tokens_were_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = {name: value for name, value in ENTRY.items() if name != "ranks"}
    older |= {"steps": "000000aa 000000bb", "lanes": "00aa 00bb"}
    runs = [folder(tmp_path / name, ledger=ledger) for name, ledger in (("1", ()), ("2", (older,)))]
    assert cli.main(["compare", *runs]) == 0
    assert capsys.readouterr().out == (
        "Equal: 2 lines of metrics. No tokens were compared: neither ledger has digests that this version reads.\n"
    )


def test_damaged_lines_are_warnings_and_folders_of_no_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = folder(tmp_path / "1"), folder(tmp_path / "2")
    for path in (tmp_path / "1" / "ledger.jsonl", tmp_path / "2" / "metrics.jsonl"):
        path.write_bytes(bytes(9) + b"\n" + path.read_bytes() + b'{"step": 9, "ki')
    assert cli.main(["compare", one, other]) == 0
    said = capsys.readouterr()
    assert said.out == "Equal: the tokens of 2 data steps, and 2 lines of metrics.\n"
    assert said.err.count("warning: ") == 2
    assert cli.main(["compare", one, str(tmp_path)]) == cli.main(["compare", str(tmp_path / "3"), one]) == 2
    nothing = [folder(tmp_path / name, ledger=(), losses=()) for name in ("3", "4")]
    assert cli.main(["compare", *nothing]) == 10
    assert "the runs have written nothing that could be compared" in capsys.readouterr().err
