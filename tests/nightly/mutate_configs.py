"""Changes configurations at random and looks at what becomes of them.

    python tests/nightly/mutate_configs.py    5,000 mutations are validated, 100 that pass are trained
    python tests/nightly/mutate_configs.py --count 500 --run 0     fewer, and none of them trained
    python tests/nightly/mutate_configs.py --first 1234 --count 1 --run 1 --show     one of them again

A mutation is a shipped YAML with changed lines, values or characters, or overrides, or a changed DeepSpeed JSON, or
several of these. Its number is its seed. `ds-encdec validate` must accept it (0) or refuse it (2), in seconds, and each
problem must begin with FILE:LINE: field (or `command line: field`). Those that pass are made tiny and trained for 3
steps on one rank, forked from this process, which has imported everything: no traceback. What a run refuses although
validate accepts it is listed. Exit code 1 where a check failed.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read by what training imports
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "launch"), str(ROOT / "tests" / "faults")]

from forked_runs import be_rank, on_this_host  # noqa: E402
from tiny_run import free_port  # noqa: E402

from ds_encdec import cli  # noqa: E402
from ds_encdec.base.types import ConfigError  # noqa: E402
from ds_encdec.config.schema import FullConfig, Section, load_config  # noqa: E402
from ds_encdec.config.yaml.deepspeed_keys import KEYS, PASSED_ON  # noqa: E402

SLOWEST_SECONDS = 5.0  # CPU time in which any configuration must be accepted or refused
RUN_SECONDS = 120.0
TINY = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
LARGEST = {
    "model": {"num_sentinel_tokens": 100, "loss_chunk_tokens": 4096},
    "data": {"max_seq_length": 512, "max_encoder_length": 128, "max_decoder_length": 128, "num_lanes": 4}
    | {"preprocessing_num_workers": 1, "shuffle_buffer_size": 1000, "max_examples_per_micro_batch": 512}
    | {"packing_pool_examples": 64, "packing_max_wait_batches": 64},
    "training": {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "global_batch_size": 4}
    | {"gradient_accumulation_steps": 2, "num_train_steps": 3, "warmup_steps": 1, "eval_samples": 8},
    "infra": {"num_gpus": 1, "hybrid_shard_size": 1},
}
"""Fields that would make a run long or large, and what they are made smaller to."""
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
PLACED = re.compile(r"  (?:.+:\d+(?::\d+)?(?: \(\S+\))?|command line|default): \S.*")
OF_FILE = re.compile(r"not valid (YAML|JSON)|no sections |no such file|cannot be read|a DeepSpeed configuration is")


@dataclass
class Case:
    """A mutated configuration."""

    yaml: str
    overrides: list[str] = field(default_factory=list)
    json: str | None = None

    def write(self, folder: Path) -> list[str]:
        """Put the files into `folder`; the arguments that name them."""
        (folder / "run.yaml").write_text(self.yaml, encoding="utf-8", errors="surrogatepass")
        arguments = ["--config", str(folder / "run.yaml")]
        if self.json is not None:
            (folder / "ds.json").write_text(self.json, encoding="utf-8", errors="surrogatepass")
            arguments += ["--deepspeed_config", str(folder / "ds.json")]
        return arguments + self.overrides


def fields(section: type[Section], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its annotation, those of sections inside of sections too."""
    for name, info in section.model_fields.items():
        inner = [kind for kind in (info.annotation, *get_args(info.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in inner if issubclass(kind, Section)]
        yield f"{path}{name}", info.annotation
        for kind in sections:
            yield from fields(kind, f"{path}{name}.")


FIELDS = list(fields(FullConfig))
YAMLS = [path.read_text() for path in sorted((ROOT / "ds_configs").glob("*.yaml"))]
JSONS = [path.read_text() for path in sorted((ROOT / "ds_configs").glob("*.json"))]
QUICKSTART = (ROOT / "ds_configs" / "quickstart.yaml").read_text()


def mutate(number: int, base: list[str]) -> Case:
    """Mutation `number` of one of the YAML texts in `base`."""
    rng = random.Random(number)
    case = Case(rng.choice(base), json=rng.choice(JSONS) if rng.random() < 0.4 else None)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 5])):
        kind = rng.random()
        if kind < 0.45:
            name, annotation = rng.choice(FIELDS)
            case.overrides.append(f"{rng.choice(['', '--'])}{name}={value(rng, annotation)}")
        elif kind < 0.65 or case.json is None:
            case.yaml = change_text(rng, case.yaml)
        elif kind < 0.75:
            case.json = change_text(rng, case.json)
        else:
            case.json = change_key(rng, case.json)
    return case


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
    """One line, value or character of it other than it was."""
    lines = text.splitlines()
    if not lines:
        return rng.choice(HOSTILE)
    at = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            lines[at] = rng.choice(["  ", " ", "\t", "- "]) + lines[at]
        case 3:
            lines[at] = re.sub(r":.*", lambda _: f": {rng.choice(HOSTILE)}", lines[at], count=1)
        case 4:
            numbers = rng.choice(["0", "-1", "1e999", "1" + "0" * 400, "1.5", '"1"', "1e2"])
            lines[at] = re.sub(r"\d[\d.e+-]*", numbers, lines[at], count=1)
        case 5:
            place = rng.randrange(len(lines[at]) + 1)
            character = rng.choice(list("{}[]:,#&*!|>'\"%@`-?\\\t\0\x07 aZ0\x85\ufeff\ud800"))
            lines[at] = lines[at][:place] + character + lines[at][place + rng.randrange(2) :]
        case 6:
            return text[: rng.randrange(len(text))]
        case _:
            place, length = rng.randrange(len(text)), rng.randrange(1, 60)
            return text[:place] + text[place + length :]
    return "\n".join(lines) + "\n"


def change_key(rng: random.Random, text: str) -> str:
    """A DeepSpeed JSON with one of the known keys set; what is no JSON any more is left alone."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    *parents, last = rng.choice(sorted(KEYS)).split(".")
    block = document
    for name in parents:
        block = block.setdefault(name, {}) if isinstance(block, dict) else {}
    if isinstance(block, dict):
        kind = PASSED_ON.get(".".join([*parents, last]), rng.choice([int, float, bool, str]))
        wrong = [None, "auto", "x", -1, 10**400, 1e300, [], {}, [[]], {"enabled": True}, "\ud800", "\0"]
        right = [json.loads(text) if kind is not str else text for text in TRIED.get(kind, ["[]"])]
        block[last] = rng.choice(wrong if rng.random() < 0.3 else right)
    return json.dumps(document, indent=rng.choice([None, 2]))


def validate(case: Case, folder: Path) -> tuple[int, str]:
    """The exit code of `ds-encdec validate`, or -1, and what is wrong with how it ended."""
    arguments = case.write(folder)
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
    return "\n".join(
        f"{mentions}      {message}"
        for mentions, message in blocks
        if not PLACED.fullmatch(mentions.splitlines()[0]) and not OF_FILE.match(message)
    )


def shrink(case: Case, folder: Path) -> list[str] | None:
    """The arguments of `case` as a tiny run of 3 steps into `folder`; None where that is no configuration."""
    arguments = case.write(folder)
    json_path = Path(arguments[3]) if case.json is not None else None
    config = load_config(Path(arguments[1]), case.overrides, json_path)
    small = config.model_dump(mode="json")
    for section, fields_of in LARGEST.items():
        for key, largest in fields_of.items():
            now = small[section][key]
            small[section][key] = min(now, largest) if isinstance(now, int) and not isinstance(now, bool) else now
    small["model"] |= {"model_name_or_path": None, "tokenizer_name_or_path": "builtin"}
    small["model"]["architecture"] = (small["model"]["architecture"] or {}) | TINY
    small["data"] |= {"dataset_name": "builtin", "dataset_config": None, "data_files": None, "mixture": None}
    small["training"]["report_to"] = [name for name in small["training"]["report_to"] if name != "wandb"]
    small["infra"] |= {"output_dir": str(folder / "out"), "device": "cpu"}
    small["training"] |= {"fp16": False}  # no CPU trains float16
    if small["data"]["eval_fraction"]:
        small["data"]["eval_fraction"] = max(small["data"]["eval_fraction"], 0.02)
    path = folder / "tiny.json"
    path.write_text(json.dumps(small))
    try:
        load_config(path)
    except ConfigError:
        return None
    return ["--config", str(path)]


def train(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Train in a fork of this process; its exit code, or that of the signal that had to end it, and its output."""
    (log := folder / "log").touch()
    program = partial(on_this_host, 0, 1, free_port(), arguments, {}, [], folder)
    pid = os.fork() or be_rank(str(log), program)
    deadline = time.monotonic() + RUN_SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(pid, 9)
        ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended[1]), log.read_text(errors="replace")


def run_some(passed: list[int], count: int, folder: Path) -> list[str]:
    """Train up to `count` of the mutations that were accepted; the failures."""
    if not count:
        return []
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # what engines import late
    import torch.profiler  # noqa: F401

    from ds_encdec.data.sources.builtin_corpus import builtin_documents
    from ds_encdec.engine.deepspeed import zero as deepspeed_zero  # noqa: F401
    from ds_encdec.training import build  # noqa: F401

    builtin_documents()
    ends: Counter[int] = Counter()
    failures, late, other = [], [], 0
    for number in passed:
        if ends.total() == count:
            break
        with TemporaryDirectory(dir=folder) as place:
            arguments = shrink(mutate(number, YAMLS), Path(place))
            if arguments is None:
                other += 1
                continue
            code, text = train(arguments, Path(place))
            ends[code] += 1
            print(f"run of mutation {number}: {code}", file=sys.stderr, flush=True)
            if code < 0 or code == 1 or "Traceback" in text:
                failures.append(f"run of mutation {number}: {code}\n{text[-3000:]}")
            elif code:
                late.append(f"  mutation {number}: {code}, {text.strip().splitlines()[-1][:300]}")
    print(f"{ends.total()} runs: exit codes {dict(ends)}, {len(failures)} failures, {other} invalid once made tiny")
    print("\n".join(["refused or ended by the run itself:", *late] if late else []), flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="mutations that are validated (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default 0)")
    parser.add_argument("--run", type=int, default=100, help="of those that pass, trained (default 100)")
    parser.add_argument("--show", action="store_true", help="print every mutation and the answer")
    options = parser.parse_args()
    codes: Counter[int] = Counter()
    failures, passed = list[str](), list[int]()
    with TemporaryDirectory(prefix="mutate-configs-") as scratch:
        os.chdir(folder := Path(scratch))
        for number in range(options.first, options.first + options.count):
            case = mutate(number, YAMLS)
            code, problem = validate(case, folder)
            codes[code] += 1
            passed += [number] * (code == 0)
            failures += [f"mutation {number}: {problem}"] * bool(problem)
            if options.show:
                print(f"--- {number}: {code}\n{case.yaml}\n{case.overrides}\n{case.json}", flush=True)
        print(f"{options.count} mutations from {options.first} on: {dict(codes)}, {len(failures)} failures", flush=True)
        failures += run_some(passed, options.run, folder)
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
