"""Types the commands of README.md and docs/README.md, in their order, in the clone that this file is in.

    python3 scripts/dev/pages.py [--list] [--without REGEX] [PAGE ...]

It stops at the first command that fails and names its page and line. Where a page says what Python code prints, the
output is compared with that. Commands that need GPUs, other hosts or an account are listed as left out, with the
reason; trainings are made shorter. It wants a clone without an `output` folder, as a new user has it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/README.md")
LEFT_OUT = (
    (r"--num_gpus 8|qwen3_0\.6b_sft|hostfiles/(2node_)?8gpu|PHASE=", "needs GPUs"),
    (r"HF_TOKEN=", "needs an account"),
    (r"--from Qwen/", "downloads a model"),
    (r"^tensorboard ", "serves until it is stopped"),
)
"""Patterns of commands that cannot be typed everywhere, and why."""
SHORTER = (
    (r"^(\./scripts/quickstart\.sh)$", r"\1 training.num_train_steps=40 training.save_steps=20"),
    (r"num_train_steps=340", "num_train_steps=60"),
    (r"((?:train\.py|sft\.yaml) .*infra\.output_dir=\S+(?! .*num_train_steps=))$", r"\1 training.num_train_steps=40"),
    (r"(train\.py .*data_files=docs/\*\.md')$", r"\1 training.num_train_steps=40"),
)
"""What makes trainings short: patterns of commands, and what is put in their place."""


class Typed(NamedTuple):
    """A command of a page, or Python code, its line there, and what it must print."""

    page: str
    line: int
    text: str
    is_python: bool = False
    prints: tuple[str, ...] = ()


def commands(page: str, text: str) -> Iterator[Typed]:
    """The commands in the blocks of a page that are bash or Python."""
    for block in re.finditer(r"^```(bash|python)\n(.*?)^```\n(?:\s*This prints ([^.]*)\.)?", text, re.M | re.S):
        line = text.count("\n", 0, block.start(2)) + 1
        if block[1] == "python":
            yield Typed(page, line, block[2], True, tuple(re.findall(r"`([^`]+)`", block[3] or "")))
            continue
        for command in re.finditer(r"(?:[^\n]*\\\n)*[^\n]+\n", block[2]):
            words = re.sub(r"(^|\s+)#\s.*$", "", command[0].strip().replace("\\\n", ""), flags=re.M)
            if words:
                yield Typed(page, line + block[2].count("\n", 0, command.start()), re.sub(r"\s+", " ", words))


def refused(typed: Typed, without: str | None) -> str | None:
    """Return why a command is left out; None for one that is typed."""
    rules = [*LEFT_OUT, *([(without, "--without")] if without else [])]
    if typed.text == "source .venv/bin/activate" and "VIRTUAL_ENV" in os.environ:
        return "an environment is active"
    return next((why for pattern, why in rules if not typed.is_python and re.search(pattern, typed.text)), None)


def type_in(typed: Typed, folder: Path) -> str | None:
    """Run a command in `folder`; returns what is wrong with it, or None."""
    text = typed.text
    for pattern, shorter in SHORTER if not typed.is_python else ():
        text = re.sub(pattern, shorter, text)
    environ = dict(os.environ)
    if "VIRTUAL_ENV" not in environ and (folder / ".venv/bin/python").exists():  # made by the first command
        environ |= {"VIRTUAL_ENV": str(folder / ".venv"), "PATH": f"{folder / '.venv/bin'}:{environ['PATH']}"}
    call = ["python", "-c", text] if typed.is_python else ["bash", "-o", "pipefail", "-c", text]
    print(f"=== {typed.page}:{typed.line}: {text.splitlines()[0] if typed.is_python else text}", flush=True)
    began, shown = time.monotonic(), []
    process = subprocess.Popen(
        call, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        shown.append(line)
    code, output = process.wait(), "".join(shown)
    print(f"--- exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    if code:
        return f"exit code {code}"
    if re.search(r"^error: ", output, re.M):  # `eval "$(…)"` hides the code
        return "it prints an error"
    missing = [words for words in typed.prints if words not in output]
    return f"it does not print {missing}, as the page says" if missing else None


def main() -> int:
    """Type the pages' commands; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE", help="(default README.md docs/README.md)")
    parser.add_argument("--list", action="store_true", help="print the commands, and why some are left out, and stop")
    parser.add_argument("--without", metavar="REGEX", help="leave out commands that match it")
    options = parser.parse_args()
    if not options.list and (ROOT / "output").exists():
        print(f"error: {ROOT / 'output'} exists: a new user's clone has none. Remove it", file=sys.stderr)
        return 2
    began, left_out, mine = time.monotonic(), [], ROOT / "mine.yaml"
    is_new = not mine.exists()
    try:
        for typed in (one for page in options.pages for one in commands(page, (ROOT / page).read_text())):
            if (why := refused(typed, options.without)) is not None:
                left_out.append(f"left out: {typed.page}:{typed.line}: {typed.text} ({why})")
            elif options.list:
                print(f"{typed.page}:{typed.line}: {typed.text}")
            elif wrong := type_in(typed, ROOT):
                print(f"error: {typed.page}:{typed.line}: {typed.text}\n       {wrong}", file=sys.stderr)
                return 1
    finally:
        if is_new and not options.list:
            mine.unlink(missing_ok=True)
    print("\n".join(left_out))
    if not options.list:
        print(f"all others succeed, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
