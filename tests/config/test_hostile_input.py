"""Files and overrides that are meant to break the program: one error each, exit code 2, a place, and no traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_encdec import cli
from ds_encdec.config.yaml.plain_files import MAX_CONFIG_BYTES

Output = pytest.CaptureFixture[str]

ALIASES = {n: f"[{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)}
BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(f"b{n}: &a{n} {nine}\n" for n, nine in ALIASES.items())
MERGE_BOMB = "a: &a0 {x: 1}\n" + "".join(f"b{n}: &a{n} {{<<: {nine}}}\n" for n, nine in ALIASES.items())


def refused(capsys: Output, *arguments: str) -> str:
    """Return what `ds-encdec validate` says to what it refuses. An exception that gets this far is a traceback."""
    assert cli.main(["validate", *arguments]) == 2
    return capsys.readouterr().err


def is_refused(capsys: Output, path: Path, text: str, place: str, message: str, *option: str) -> None:
    path.write_text(text)
    shown = refused(capsys, *option, str(path))
    assert re.search(rf"{re.escape(f'{path}:{place}' if place else str(path))}.*\n      .*{re.escape(message)}", shown)
    assert len(shown) < 100_000


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ('training: {bf16: !!bool "x"}', "1: training.bf16", "cannot be read"),
        ("training: {seed: !!timestamp x}", "1: training.seed", "unknown tag"),
        ("training: !!python/object/apply:os.system [true]", "1: training", "unknown tag"),
        (f"training: {{num_train_steps: 1{'0' * 400}}}", "1: training.num_train_steps", "64 bits"),
        ("training: {learning_rate: 1e300}", "1: training.learning_rate", "must fit into a 32-bit float"),
        (f"training: {{seed: {'7' * 5000}}}", "1: training.seed", "cannot be read"),
        ('infra: {output_dir: "\\UFFFFFFFF"}', "1", "not valid YAML"),
        ("training:\n  seed: 1\x00", "2", "the character U+0000"),
        ('"": 1', '1: ""', "not a key"),
        ("training: &t {seed: *t}", "1: training.seed.seed", "nested more than 100 deep"),
        ("training: {<<: 3}", "1: training.<<", "needs a mapping"),
        ("training: {seed: " + "[" * 101 + "]" * 101 + "}", "1: training.seed.0.0", "nested more than 100 deep"),
        ("training: {seed: " + "[" * 100_000, "1", "nested too deep"),
        (f"training: &t {'[' * 60}{']' * 60}\ndata: {'[' * 60}*t{']' * 60}", "1: data.0.0", "more than 100 deep"),
        (BOMB, "1: b4", "more than 10000 values"),
        (MERGE_BOMB, "1: b4", "more than 10000 values"),
        (f"# {'x' * MAX_CONFIG_BYTES}", "", "larger than 1 MB"),
    ],
)
def test_yaml(tmp_path: Path, capsys: Output, text: str, place: str, message: str) -> None:
    is_refused(capsys, tmp_path / "run.yaml", text, place, message)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (f'{{"steps_per_print": 1{"0" * 300}}}', "1:2: steps_per_print", "64 bits"),
        ('{"gradient_clipping": NaN}', "1:2: gradient_clipping", "finite number"),
        ('{"bf16": ' + '{"a":' * 100_000, "", "not valid JSON"),
        ('{\n"' + '\\"' * 400_000, "2:1", "not valid JSON"),
        ('{"fp16": {\n"enabled": tru}}', "2:12", "not valid JSON"),
        ('{"a.b": 1}', "1:2: a.b", "not a key"),
        (f'{{"a": "{"x" * MAX_CONFIG_BYTES}"}}', "", "larger than 1 MB"),
    ],
)
def test_deepspeed_json(tmp_path: Path, capsys: Output, text: str, place: str, message: str) -> None:
    is_refused(capsys, tmp_path / "ds.json", text, place, message, "--deepspeed_config")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.seed=" + "[" * 5000, "training.seed\n .*nested too deep"),
        ("training.seed=[&a {b: *a}]", "training.seed\n .*nested more than 100 deep"),
        (f"infra.deepspeed_extra={{{BOMB.replace(chr(10), ', ')}}}", "infra.deepspeed_extra\n .*more than 10000"),
        ("infra.deepspeed_extra." + "a." * 5000 + "b=1", "not a setting"),
    ],
)
def test_overrides(capsys: Output, override: str, message: str) -> None:
    shown = refused(capsys, override)
    assert re.search("  command line: " + message, shown) or (message == "not a setting" and message in shown)
    shown.encode()


def test_a_pipe_is_read_like_a_file_and_a_device_is_too_large(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "run.yaml").write_text("training: {seed: 5}\n")
    os.mkfifo(tmp_path / "fifo")
    program = f"{sys.executable} -m ds_encdec.cli train --print-config"
    for script in (
        "PROGRAM --config <(cat run.yaml)",
        "cat run.yaml >fifo & PROGRAM --config fifo",
    ):
        command = ["bash", "-c", script.replace("PROGRAM", program) + " --deepspeed_config <(echo '{}')"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert "  seed: 5\n" in ended.stdout, ended.stderr
    assert "/dev/zero\n      cannot be read: larger than 1 MB" in refused(capsys, "/dev/zero")
    assert f"{tmp_path}\n      cannot be read: Is a directory" in refused(capsys, str(tmp_path))
