"""The rows of tests/nightly/mutations.toml fit the code: else a mistake that they plant would be none."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("nightly")))

import mutations

AREAS = {
    *("commit", "resume", "agreement", "skip", "rollback", "guards", "signals", "schedules"),
    *("losses", "packing", "masking", "averaging", "export", "conversion", "objectives"),
    *("finite", "tokens", "secrets"),
}


def test_every_row_fits_the_code_and_names_tests() -> None:
    rows = mutations.read_rows()
    assert [problem for row in rows for problem in row.problems(mutations.REPOSITORY)] == []
    assert len(rows) >= 80
    assert len({row.name for row in rows}) == len(rows)
    assert {row.area for row in rows} >= AREAS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "a text that is not there"}, "its text is 0 times in ds_encdec/data/packing.py, not once"),
        ({"old": "self"}, "times in ds_encdec/data/packing.py, not once"),
        ({"new": "class Packer(Generic[Item]):"}, "or is not changed"),
        ({"tests": ["tests/data/test_packing.py::test_nothing"]}, "there is no test tests/data/test_packing.py::"),
        ({"tests": []}, "no test is named"),
    ],
)
def test_a_row_that_does_not_fit_is_named(change: dict[str, object], problem: str) -> None:
    row = {
        "area": "packing",
        "name": "a row",
        "file": "ds_encdec/data/packing.py",
        "old": "class Packer(Generic[Item]):",
        "new": "class Packer:",
        "tests": ["tests/data/test_packing.py::test_nobody_waits_too_long_and_nothing_is_lost"],
    }
    (found,) = mutations.Mutation(**row | change).problems(mutations.REPOSITORY)  # type: ignore[arg-type]
    assert problem in found


def test_a_mistake_is_planted_noticed_and_taken_out_again(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text("HALF = 1 / 2\n")
    (tmp_path / "test_halves.py").write_text("from halves import HALF\n\ndef test_half():\n    assert HALF * 2 == 1\n")
    tests = mutations.Tests(tmp_path, ["env"], seconds=60)
    row = mutations.Mutation("here", "a third", "halves.py", "1 / 2", "1 / 3", ["test_halves.py::test_half"])
    verdicts = [tests.run(row.tests)[0]]
    with mutations.planted(row, tmp_path):
        verdicts.append(tests.run(row.tests)[0])
    verdicts.append(tests.run(["test_halves.py::test_nothing"])[0])
    assert verdicts == ["passed", "noticed", "error"]
    assert (tmp_path / "halves.py").read_text() == "HALF = 1 / 2\n"
