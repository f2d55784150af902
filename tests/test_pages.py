"""`scripts/dev/pages.py`, which types the commands of README.md: what it finds on a page, and what it calls wrong."""

import runpy
from pathlib import Path
from types import SimpleNamespace

PAGES = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "scripts/dev/pages.py")))
PAGE = """Words

```bash
echo two \\
    three 'a #b'   # a comment
deepspeed --num_gpus 8 ds_encdec/train.py
```

```python
print("right")
```

This prints `right` and `left`.
"""


def test_commands_are_typed_and_what_fails_or_prints_something_else_is_wrong(tmp_path: Path) -> None:
    echo, gpus, program = PAGES.commands("page", PAGE)
    assert [(one.line, one.text) for one in (echo, gpus)] == [
        (4, "echo two three 'a #b'"),
        (6, "deepspeed --num_gpus 8 ds_encdec/train.py"),
    ]
    assert (program.line, program.is_python, program.prints) == (10, True, ("right", "left"))
    assert [PAGES.refused(one, None) for one in (echo, gpus, program)] == [None, "needs GPUs", None]
    assert PAGES.type_in(echo, tmp_path) is None
    assert PAGES.type_in(program, tmp_path) == "it does not print ['left'], as the page says"
    for command, wrong in (("exit 3", "exit code 3"), ('eval "$(echo error: no >&2; exit 2)"', "it prints an error")):
        assert PAGES.type_in(PAGES.Typed("page", 1, command), tmp_path) == wrong
