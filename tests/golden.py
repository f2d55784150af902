"""Messages that tests expect stand in one file per folder of tests, `golden.txt`, and not in the tests.

`golden(text)` compares a text with the next entry of the running test. `python -m pytest PATH --update-golden` writes
the entries of the tests that it runs; the change is then read with `git diff` like any other.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
_HEADING = re.compile(r"^=== (.+)\n", re.M)
_written = pytest.StashKey[dict[Path, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the tests' messages to golden.txt")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_written] = {}
    if config.getoption("--update-golden") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--update-golden writes from one process: add -n 0")


def read_entries(file: Path) -> dict[str, str]:
    """The entries of a golden file by their headings."""
    parts = _HEADING.split(file.read_text()) if file.is_file() else [""]
    return {heading: text.rstrip("\n") for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def _test_of(heading: str) -> str:
    return re.sub(r" \d+$", "", heading)


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[object], None]]:
    """Return a function that compares the text of an object with the golden file; `tmp_path` reads `TMP` there."""
    test, config = request.node, request.config
    folder = TESTS / test.path.relative_to(TESTS).parts[0]
    file = (folder if folder.is_dir() else TESTS) / "golden.txt"
    name = f"{test.path.relative_to(file.parent)}::{test.name}"
    entries = read_entries(file)
    texts: list[str] = []

    def compare(what: object) -> None:
        text = "\n".join(line.rstrip() for line in str(what).replace(str(tmp_path), "TMP").splitlines()).strip("\n")
        texts.append(text)
        if not config.getoption("--update-golden"):
            heading = name if len(texts) == 1 else f"{name} {len(texts)}"
            assert heading in entries, f"{file} has no entry {heading}: run this test with --update-golden -n 0"
            assert text == entries[heading]

    yield compare
    expected = sum(_test_of(heading) == name for heading in entries)
    if config.getoption("--update-golden"):
        numbered = {name if number == 1 else f"{name} {number}": text for number, text in enumerate(texts, start=1)}
        config.stash[_written].setdefault(file, {}).update(numbered)
    elif not request.node.stash.get(_failed, False):
        assert len(texts) == expected, f"{file} has {expected} entries of {name}, and the test compared {len(texts)}"


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the entries of the tests that ran; of a whole file of tests those of tests that no longer exist go."""
    whole = not session.config.option.keyword and not any("::" in argument for argument in session.config.args)
    for file, new in session.config.stash[_written].items():
        ran = {_test_of(heading) for heading in new}
        files = {name.partition("::")[0] for name in ran} if whole else set()
        kept = {
            heading: text
            for heading, text in read_entries(file).items()
            if _test_of(heading) not in ran and heading.partition("::")[0] not in files
        }
        file.write_text("".join(f"=== {heading}\n{text}\n\n" for heading, text in sorted((kept | new).items())))
