"""Files and overrides that are meant to break the program: one error each, exit code 2, a place, and no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_encdec import cli
from ds_encdec.config.plain_files import MAX_CONFIG_BYTES
from ds_encdec.config.schema import load_config

Output = pytest.CaptureFixture[str]

BOMB = "a: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGE_BOMB = "a: &a0 {x: 1}\n" + "".join(
    f"b{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)


def refused(capsys: Output, *arguments: str) -> str:
    """Return what `ds-encdec validate` says to what it refuses. An exception that gets this far is a traceback."""
    assert cli.main(["validate", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ('training: {bf16: !!bool "x"}', "1: training.bf16", "this is no bool"),
        ('training:\n  seed: !!int "x"', "2: training.seed", "this is no int"),
        ("training: {learning_rate: !!float x}", "1: training.learning_rate", "this is no float"),
        ("training: {seed: !!timestamp x}", "1: training.seed", "unknown tag"),
        ("training: !!python/object/apply:os.system [true]", "1: training", "unknown tag"),
        ("training: !foo {seed: 1}", "1: training", "unknown tag"),
        ("training: {report_to: !!set [wandb]}", "1: training.report_to", "unknown tag"),
        ("training: {seed: !<int> 3}", "1: training.seed", "unknown tag"),  # not YAML's own, which is `!!int`
        ("training: {!<str> seed: 3}", "1: training.seed", "not a key"),
        ("training: {!!python/name:os.system seed: 1}", "1: training.seed", "not a key"),
        (f"training: {{num_train_steps: 1{'0' * 400}}}", "1: training.num_train_steps", "64 bits"),
        (f"training: {{num_train_steps: 1{'0' * 300}}}", "1: training.num_train_steps", "64 bits"),
        ("training: {num_train_steps: 1e30}", "1: training.num_train_steps", "must be a whole number"),
        ("training: {learning_rate: 1e300}", "1: training.learning_rate", "must fit into a 32-bit float"),
        (f"training: {{seed: {'7' * 5000}}}", "1: training.seed", "64 bits"),
        (
            f"infra:\n  deepspeed_extra: {{log_level: [1{'0' * 300}]}}",
            "2: infra.deepspeed_extra.log_level.0",
            "64 bits",
        ),
        ('infra: {deepspeed_config: "\\0"}', "1: infra.deepspeed_config", "NUL"),
        ('infra: {output_dir: "\\ud800"}', "1: infra.output_dir", "surrogate"),
        ('infra: {output_dir: "\\UFFFFFFFF"}', "1: infra", "not valid YAML"),
        ("training:\n  seed: 1\x00", "2", "the character U+0000"),
        ('"": 1', '1: ""', "not a key"),
        ('training: {"se\\ned": 1}', "1: training.se\\ned", "not a key"),
        (f"training: {{{'x' * 1000}: 1}}", "1: training.xxx", "not a key"),
        ("training: &t {seed: *t}", "1: training.seed", "*t stands inside of what it stands for"),
        ("training: &t\n  <<: *t", "2: training.<<", "*t stands inside of what it stands for"),
        ("training: {<<: 3}", "1: training.<<", "needs a mapping"),
        ("training: {seed: " + "[" * 101 + "]" * 101 + "}", "1: training.seed.0.0", "nested more than 100 deep"),
        ("training: {seed: " + "[" * 100_000, "1: training.seed.0.0", "nested more than 100 deep"),
        ("training:\n  seed:\n    " + "- " * 101, "3: training.seed.0.0", "nested more than 100 deep"),
        (
            f"training: &t {'[' * 60}{']' * 60}\ndata: {'[' * 60}*t{']' * 60}",
            "2: data.0.0",
            "nested more than 100 deep",
        ),
        (BOMB, "5: b4", "more than 10000 keys"),
        (MERGE_BOMB, "5: b4", "more than 10000 keys"),
        ("training: {seed: [" + "1, " * 300_000 + "]}", "1: training.seed.99", "more than 10000 keys"),
        ("".join(f"key_{n}: 1\n" for n in range(4900)), "1: key_0", "unknown key"),
        ("".join(f"k{n}: 1\n" for n in range(90_000)), "5000: k4999", "more than 10000 keys"),
        ("%YAML " + "1" * 5000 + ".1\n--- 1", "1", "not valid YAML"),
        (f"# {'x' * MAX_CONFIG_BYTES}", "", "larger than 1 MB"),
        (f"training: {{seed: {'x' * (MAX_CONFIG_BYTES - 100)}}}", "1: training.seed", "must be a whole number"),
    ],
)
def test_yaml(tmp_path: Path, capsys: Output, text: str, place: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    shown = refused(capsys, str(path))
    assert re.search(rf"{re.escape(f'{path}:{place}' if place else str(path))}.*\n      .*{re.escape(message)}", shown)
    assert len(shown) < 100_000


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (f'{{\n"steps_per_print": {"9" * 5000}}}', "2:1: steps_per_print", "64 bits"),
        (f'{{"steps_per_print": 1{"0" * 300}}}', "1:2: steps_per_print", "64 bits"),
        ('{"gradient_clipping": NaN}', "1:2: gradient_clipping", "finite number"),
        ('{"log_level": "\\ud800"}', "1:2: log_level", "surrogate"),
        ('{"log_level": "a\\u0000"}', "1:2: log_level", "NUL"),
        ('{"bf16": ' + "[" * 900 + "]" * 900 + "}", "1:109: bf16", "nested more than 100 deep"),
        ('{"bf16": ' + '{"a":' * 100_000, "1:", "nested more than 100 deep"),
        ('{"bf16": [' + "1," * 20_000 + "1]}", "1:", "more than 10000 values"),
        ('{\n"' + '\\"' * 400_000, "2:1", "not valid JSON"),
        ('{"fp16": {\n"enabled": tru}}', "2:12: fp16.enabled", "not valid JSON"),
        ('{"a.b": 1}', "1:2: a.b", "unknown key"),
        ('{"": 1}', "1", "unknown key"),
        ("{" + ",".join(f'"key_{n}": 1' for n in range(4900)) + "}", "1:2: key_0", "unknown key"),
        (f'{{"{"k" * 900_000}": 1}}', "1", "unknown key"),
        (f'{{"a": "{"x" * MAX_CONFIG_BYTES}"}}', "", "larger than 1 MB"),
    ],
)
def test_deepspeed_json(tmp_path: Path, capsys: Output, text: str, place: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    shown = refused(capsys, "--deepspeed_config", str(path))
    assert re.search(rf"{re.escape(f'{path}:{place}' if place else str(path))}.*\n      .*{re.escape(message)}", shown)
    assert len(shown) < 100_000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('training.bf16=!!bool "x"', "training.bf16 .*\n      this is no bool"),
        ("training.report_to=!!foo [wandb]", "training.report_to .*\n      unknown tag"),
        ("training.seed=" + "[" * 5000, "training.seed\n .*nested more than 100 deep"),
        ("training.seed=[&a {b: *a}]", "training.seed\n .*stands inside of what it stands for"),
        (f"infra.deepspeed_extra={{{BOMB.replace(chr(10), ', ')}}}", "infra.deepspeed_extra\n .*more than 10000"),
        ("infra.deepspeed_extra." + "a." * 5000 + "b=1", "not a setting"),
        ("training.seed=" + "1" * 5000, "training.seed = .1111.*\n      must be a number of at most 64 bits"),
        ("infra.output_dir=\udcff", r"infra\.output_dir\n .*U\+DCFF is not allowed"),
        ('infra.output_dir="\\0"', r"infra\.output_dir = .*\n .*NUL"),
        ("training={<<: {seed: x}}", r"training.seed = .*\n      must be a whole number"),
    ],
)
def test_overrides(capsys: Output, override: str, message: str) -> None:
    shown = refused(capsys, override)
    assert re.search("  command line: " + message, shown) or (message == "not a setting" and message in shown)
    shown.encode()


def test_only_plain_files_are_opened(tmp_path: Path, capsys: Output) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, kind in ((fifo, "a FIFO"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        for arguments in ((str(path),), ("--deepspeed_config", str(path))):
            assert f"{path}\n      cannot be read: {kind}, not a plain file" in refused(capsys, *arguments)
    shown = refused(capsys, f"infra.deepspeed_config={fifo}")
    assert re.search(rf"command line: infra.deepspeed_config = .*\n  {fifo}\n      cannot be read: a FIFO", shown)


def test_a_pipe_that_the_shell_has_opened_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("training: {seed: 5}\n")
    program = f"{sys.executable} -m ds_encdec.cli train --print-config"
    for script in ("PROGRAM --config <(cat run.yaml)", "PROGRAM --config /dev/stdin <run.yaml"):
        command = ["bash", "-c", script.replace("PROGRAM", program) + " --deepspeed_config <(echo '{}')"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert "  seed: 5\n" in ended.stdout, ended.stderr
    refused = subprocess.run(
        ["bash", "-c", f"{program} --config /dev/stdin </dev/zero"], capture_output=True, text=True
    )
    assert "a device, not a plain file" in refused.stderr


@pytest.mark.parametrize(
    ("name", "reason", "in_a_setting"),
    [
        ("x" * 5000, "cannot be read: File name too long", "cannot be read: File name too long"),
        ("a\0b", "cannot be read: embedded null byte", r"U\+0000 is not allowed"),
        ("/proc/self/mem/x", "cannot be read: Not a directory", "cannot be read: Not a directory"),
    ],
)
def test_names_that_no_file_can_have(capsys: Output, name: str, reason: str, in_a_setting: str) -> None:
    assert f"      {reason}\n" in refused(capsys, name)
    place = r"command line: infra\.deepspeed_config[^~]*"
    assert re.search(place + in_a_setting, refused(capsys, f"infra.deepspeed_config={name}"))


def test_an_alias_of_a_mapping_with_merges_is_no_repeated_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("phases:\n  validation: &v {<<: {save_steps: 3, eval_steps: 9}, save_steps: 4}\n  medium: *v\n")
    phases = load_config(path).phases
    assert [(phase.save_steps, phase.eval_steps) for phase in (phases.validation, phases.medium)] == [(4, 9)] * 2
