"""Golden files: what the fixture writes, compares and refuses (tests/golden.py)."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TEST = """
import pytest

@pytest.mark.parametrize("name", ["a", "b"])
def test_message(golden, tmp_path, name):
    golden(f"{tmp_path}/x: TEXT")
    golden(name)
"""


def test_a_message_that_changed_or_was_never_written_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.mkdir("tests") / "golden.py").write_text(Path(__file__).with_name("golden.py").read_text())
    (pytester.path / "tests/conftest.py").write_text('pytest_plugins = ["golden"]\n')
    folder = pytester.mkdir("tests/config")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path / "tests"))

    def run(test: str, *arguments: str) -> dict[str, int]:
        (folder / "test_inner.py").write_text(test)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, "tests").parseoutcomes()

    assert run(TEST) == {"failed": 2}
    assert run(TEST, "--update-golden") == {"passed": 2}
    written = (folder / "golden.txt").read_text()
    first, second = "=== test_inner.py::test_message[a]\nTMP/x: TEXT\n", "=== test_inner.py::test_message[a] 2\na\n"
    assert written.startswith(f"{first}\n{second}")
    assert run(TEST) == {"passed": 2}
    assert run(TEST.replace("TEXT", "new")) == {"failed": 2}
    assert run(TEST.replace("golden(name)", "")) == {"passed": 2, "errors": 2}  # one message less
    run(TEST.replace(', "b"', ""), "--update-golden")
    assert "[b]" not in (folder / "golden.txt").read_text()
