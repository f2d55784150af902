"""Changes configurations at random and looks at what becomes of them.

    python tests/nightly/mutate_configs.py    5,000 mutations are validated
    python tests/nightly/mutate_configs.py --first 1234 --count 1     one of them again, shown

A mutation is a shipped YAML with changed lines, values or characters, or overrides, or a changed DeepSpeed JSON, or
several of these. Its number is its seed. `ds-encdec validate` must accept it (0) or refuse it (2), in seconds, and each
problem must begin with FILE:LINE: field (or `command line: field`). Exit code 1 where a check failed.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ds_encdec import cli  # noqa: E402
from ds_encdec.config.schema import FullConfig, Section  # noqa: E402
from ds_encdec.config.yaml.deepspeed_keys import KEYS  # noqa: E402

SLOWEST_SECONDS = 30.0  # CPU time in which any configuration must be accepted or refused
HOSTILE = [
    '!!bool "x"', "!!int x", "!!float x", "!!python/name:os.system", "!foo [1]", "*a", "&a [*a]", '"\\0"', '"\\ud800"',
    "1" + "0" * 400, "7" * 5000, "-1", "0", "1e999", "1e300", "-.inf", ".nan", "null", "", "[]", "{}", "[[[[]]]]",
    "{a: {b: c}}", "~nobody/x", "yes", '"', "'", "[1", "{", "- 1", ": :", "\t", "#", "<<", "9223372036854775807",
    "-9223372036854775808", "0x10", "1_0", "2026-01-01", "a\u2028b", "\U0001f600", "[" * 120, "x" * 300, "../..",
    "/dev/null",
]  # fmt: skip
TRIED = {
    bool: ["true", "false"],
    int: ["0", "1", "2", "3", "5", "8", "64", "1000", "100000", "1e3", "1.5"],
    float: ["0", "0.0", "0.001", "0.5", "1", "1.0", "2", "10", "1e-8", "1e8"],
    str: ["x", "a/b", "builtin", "random", "text", "null", "''", "./x"],
}
PLACED = re.compile(r"  (?:.+:\d+(?::\d+)?(?: \(\S+\))?|command line(?: \(\S+ = .+\))?|default): \S.*")
OF_FILE = re.compile(r"not valid (YAML|JSON)|no sections |no such file|cannot be read|a DeepSpeed configuration is")


def fields(section: type[Section], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in section.model_fields.items():
        yield f"{path}{name}", info.annotation
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from fields(kind, f"{path}{name}.")


FIELDS = list(fields(FullConfig))
YAMLS = [path.read_text() for path in sorted((ROOT / "ds_configs").glob("*.yaml"))]
JSONS = [path.read_text() for path in sorted((ROOT / "ds_configs").glob("*.json"))]


def mutate(number: int, folder: Path) -> list[str]:
    """Write the files of mutation `number`; the arguments that name them, and overrides."""
    rng = random.Random(number)
    texts, overrides = {"yaml": rng.choice(YAMLS)}, []
    if rng.random() < 0.4:
        texts["json"] = rng.choice(JSONS)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 5])):
        kind = rng.random()
        if kind < 0.45:
            name, annotation = rng.choice(FIELDS)
            overrides.append(f"{rng.choice(['', '--'])}{name}={value(rng, annotation)}")
        elif kind < 0.75:
            changed = rng.choice([*texts])
            texts[changed] = change_text(rng, texts[changed])
        elif "json" in texts:
            texts["json"] = change_key(rng, texts["json"])
    for kind_of_file, text in texts.items():
        (folder / f"run.{kind_of_file}").write_text(text, encoding="utf-8", errors="surrogatepass")
    deepspeed = ["--deepspeed_config", str(folder / "run.json")] if "json" in texts else []
    return ["--config", str(folder / "run.yaml"), *deepspeed, *overrides]


def value(rng: random.Random, annotation: Any) -> str:
    """Mostly one that the type might allow."""
    if rng.random() < 0.3:
        return rng.choice(HOSTILE)
    kinds = [annotation, *get_args(annotation)]
    words = [str(word) for kind in kinds for word in get_args(kind) if isinstance(word, str)]
    words += [word for word in kinds if isinstance(word, str)]
    tried = [text for kind in kinds if isinstance(kind, type) for text in TRIED.get(kind, [])]
    return rng.choice(words + tried or [text for texts in TRIED.values() for text in texts])


def change_text(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    if not lines:
        return rng.choice(HOSTILE)
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines[at] = rng.choice(["  ", " ", "\t", "- "]) + lines[at]
        case 2:
            lines[at] = re.sub(r":.*", lambda _: f": {rng.choice(HOSTILE)}", lines[at], count=1)
        case 3:
            place = rng.randrange(len(lines[at]) + 1)
            character = rng.choice(list("{}[]:,#&*!|>'\"%@`-?\\\t\0\x07 aZ0\x85\ufeff\ud800"))
            lines[at] = lines[at][:place] + character + lines[at][place + rng.randrange(2) :]
        case _:
            return text[: rng.randrange(len(text))]
    return "\n".join(lines) + "\n"


def change_key(rng: random.Random, text: str) -> str:
    try:
        document = json.loads(text)
    except ValueError:  # no JSON any more
        return text
    *parents, last = rng.choice(sorted(KEYS)).split(".")
    block = document
    for name in parents:
        block = block.setdefault(name, {}) if isinstance(block, dict) else {}
    if isinstance(block, dict):
        wrong = [None, "auto", "x", -1, 10**400, 1e300, [], {}, [[]], {"enabled": True}, "\ud800", "\0"]
        block[last] = rng.choice(wrong if rng.random() < 0.3 else [True, False, 0, 1, 2, 1000, 0.5, "cpu"])
    return json.dumps(document, indent=rng.choice([None, 2]))


def validate(arguments: list[str]) -> tuple[int, str]:
    """The exit code of `ds-encdec validate`, or -1, and what is wrong with how it ended."""
    printed, began = io.StringIO(), time.process_time()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(["validate", *arguments])
    except SystemExit as end:  # argparse's own
        code = int(end.code or 0)
    except BaseException:
        return -1, traceback.format_exc()
    seconds = time.process_time() - began
    if code not in (0, 2):
        return code, f"exit code {code}: {printed.getvalue()}"
    if seconds > SLOWEST_SECONDS:
        return code, f"took {seconds:.1f} s"
    return code, unplaced(printed.getvalue()) if code else ""


def unplaced(report: str) -> str:
    """The problems of a report that name neither line nor field; empty for none."""
    blocks = re.findall(r"((?:^  \S.*\n)+)^      (.*)$", report, re.MULTILINE)
    if not blocks and "usage:" not in report:
        return f"no problem is listed: {report}"
    wrong = [block for block in blocks if not (PLACED.fullmatch(block[0].splitlines()[0]) or OF_FILE.match(block[1]))]
    return "\n".join(map("      ".join, wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="mutations that are validated (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default 0)")
    options = parser.parse_args()
    codes: Counter[int] = Counter()
    failures: list[str] = []
    with TemporaryDirectory(prefix="mutate-configs-") as scratch:
        os.chdir(folder := Path(scratch))
        for number in range(options.first, options.first + options.count):
            arguments = mutate(number, folder)
            code, problem = validate(arguments)
            codes[code] += 1
            failures += [f"mutation {number}: {problem}"] * bool(problem)
            if options.count == 1:
                print(code, arguments[2:], *(path.read_text(errors="replace") for path in folder.iterdir()), sep="\n")
        print(f"{options.count} mutations from {options.first} on: {dict(codes)}, {len(failures)} failures", flush=True)
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
