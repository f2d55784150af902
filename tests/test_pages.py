"""`scripts/dev/pages.py`, which types the commands of README.md: what it finds on a page, and what it calls wrong."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts/dev/pages.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


PAGE = """Words

```bash
echo one   # a comment
echo two \\
    three 'a #b'
deepspeed --num_gpus 8 ds_encdec/train.py
```

```python
print("right")
```

This prints `right` and `left`.
"""


def test_commands_have_their_lines_and_what_they_print(pages: ModuleType) -> None:
    found = list(pages.commands("page", PAGE))
    assert [(one.line, one.text) for one in found[:3]] == [
        (4, "echo one"),
        (5, "echo two three 'a #b'"),
        (7, "deepspeed --num_gpus 8 ds_encdec/train.py"),
    ]
    assert (found[3].line, found[3].is_python, found[3].prints) == (11, True, ("right", "left"))
    assert [pages.refused(one, None) for one in found] == [None, None, "needs GPUs", None]


def test_what_fails_is_wrong_and_so_is_other_output(pages: ModuleType, tmp_path: Path) -> None:
    found = list(pages.commands("page", PAGE))
    assert pages.type_in(found[0], tmp_path) is None
    assert pages.type_in(found[3], tmp_path) == "it does not print ['left'], as the page says"
    for command, wrong in (("exit 3", "exit code 3"), ('eval "$(echo error: no >&2; exit 2)"', "it prints an error")):
        assert pages.type_in(pages.Typed("page", 1, command), tmp_path) == wrong
