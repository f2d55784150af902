"""Golden files: what the fixture writes, compares and refuses (tests/golden.py)."""

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[dict[str, int], str]]

pytest_plugins = ["pytester"]

TEST = """
import pytest

@pytest.mark.parametrize("name", ["a", "b"])
def test_message(golden, tmp_path, name):
    golden(f"{tmp_path}/x: {TEXT}")
    golden(name)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the inner tests with `text`, in a folder `tests/config`, and return how they ended."""
    source = Path(__file__).with_name("golden.py").read_text()
    (pytester.mkdir("tests") / "golden.py").write_text(source)
    (pytester.path / "tests/conftest.py").write_text('pytest_plugins = ["golden"]\n')
    pytester.mkdir("tests/config")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path / "tests"))

    def once(text: str, *arguments: str, tests: str = TEST) -> tuple[dict[str, int], str]:
        (pytester.path / "tests/config/test_inner.py").write_text(f"TEXT = {text!r}\n{tests}")
        outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, "tests")
        golden = pytester.path / "tests/config/golden.txt"
        return outcome.parseoutcomes(), golden.read_text() if golden.is_file() else ""

    return once


def test_a_message_that_changed_or_was_never_written_fails(run: Run) -> None:
    assert run("old")[0] == {"failed": 2}
    outcomes, written = run("old", "--update-golden")
    assert outcomes == {"passed": 2}
    assert written.startswith(
        "=== test_inner.py::test_message[a]\nTMP/x: old\n\n=== test_inner.py::test_message[a] 2\na\n"
    )
    assert run("old") == ({"passed": 2}, written)
    assert run("new") == ({"failed": 2}, written)
    assert run("old", tests=TEST.replace("golden(name)", ""))[0] == {"passed": 2, "errors": 2}  # one message less
    assert run("new", "--update-golden", "-k", "a]")[1].count("old") == 1  # others stay
    assert "[b]" not in run("new", "--update-golden", tests=TEST.replace(', "b"', ""))[1]
