"""`ds-encdec validate` looks for what a configuration names on this machine; loading one does not."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_encdec import cli, train
from ds_encdec.commands import runs
from ds_encdec.config.schema import load_config
from ds_encdec.registry import text_metrics
from ds_encdec.training import absent

Output = pytest.CaptureFixture[str]

QUICKSTART = str(Path(__file__).resolve().parents[2] / "ds_configs" / "quickstart.yaml")


ABSENT = (
    "data.dataset_name=text data.data_files=[here.txt,absent/**/*.txt]",
    "data.dataset_name=json data.data_files=folder",
    "data.dataset_name=parquet data.data_files=~nobody-here/x",
    'data.mixture=[{"weight":1,"dataset_name":"builtin"},{"weight":1,"dataset_name":"text","data_files":"x"}]',
    "model.model_name_or_path=./absent",
    "model.model_name_or_path=folder",
    "model.tokenizer_name_or_path=folder",
    "data.prepared_dir=folder",
    "training.num_train_epochs=2",
    'training.num_train_epochs=2 data.mixture=[{"weight":1,"dataset_name":"folder"}]',
    "infra.output_dir=here.txt/run",
    "infra.output_dir=~nobody-here/run",
    "infra.output_dir=/proc/run",
    "infra.logging_dir=/proc/self/status/logs",
    "infra.offload_optimizer=nvme infra.nvme_path=missing",
    "infra.offload_optimizer=nvme infra.nvme_path=/proc",
)


def test_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, golden: Callable[[object], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").touch()
    (tmp_path / "folder").mkdir()
    shown = ""
    for words in ABSENT:
        overrides = words.split()
        assert cli.main(["validate", *overrides]) == 2
        shown += capsys.readouterr().err.partition("\n")[2]
        assert cli.main(["validate", "--elsewhere", *overrides]) == 0
        load_config(None, overrides)
    golden(re.sub(r"(?<=/proc cannot be written to ).*", "(REASON)", shown))  # root gets another than others


@pytest.mark.parametrize(
    ("mistakes", "leaves_open"),
    [
        (["trainning.x=1", "infra.num_gpus=0"], False),
        (["training.warmup_steps=500", "training.num_train_steps=300"], False),
        (["data.dataset_name=7.5"], True),  # nobody knows whether it has files
    ],
)
def test_what_is_not_there_is_reported_beside_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, mistakes: list[str], leaves_open: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["data.dataset_name=json", "data.data_files=absent.json", "infra.output_dir=/proc/run"]
    assert cli.main(["validate", QUICKSTART, "--hostfile", "no-hosts", *files, *mistakes]) == 2
    shown = capsys.readouterr().err
    assert ("no file matches absent.json" in shown) is not leaves_open
    assert all(said in shown for said in ("/proc cannot be written to", "no-hosts\n      no such file"))
    assert all(mistake.partition("=")[0].split(".")[0] in shown for mistake in mistakes)


def test_a_machine_without_the_gpu_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, tmp_path: Path
) -> None:
    output = f"infra.output_dir={tmp_path / 'run'}"
    for module in (runs, train):
        monkeypatch.setattr(module, "has_gpu", lambda: False)
    assert cli.main(["train", "infra.device=cuda", output]) == 2
    assert "error: infra.device=cuda, but this machine has no GPU." in capsys.readouterr().err
    assert cli.main(["validate", output]) == 0
    assert "warning: infra.device=cuda (the default), and" in capsys.readouterr().out
    monkeypatch.setattr(runs, "has_gpu", lambda: True)
    assert cli.main(["validate", output]) == 0
    assert "warning: infra.device" not in capsys.readouterr().out


def test_a_package_that_a_setting_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    wanted = ["training.eval_generate_samples=4", "training.metric_for_best_model=rougeL", "model.lora={}"]
    wanted = ["--config", QUICKSTART, *wanted, f"infra.output_dir={tmp_path / 'run'}"]
    assert cli.main(["validate", *wanted]) == 0
    monkeypatch.setattr(text_metrics, "find_spec", lambda name: None)
    monkeypatch.setattr(absent, "find_spec", lambda name: None)
    for verb in ("validate", "train"):
        assert cli.main([verb, *wanted]) == 2
        shown = capsys.readouterr().err
        assert 'training.metric_for_best_model = "rougeL"' in shown
        assert "pip install 'ds_encdec[eval]'" in shown
        assert "this needs peft, which is not installed: pip install 'ds_encdec[lora]'" in shown
    assert not (tmp_path / "run").exists()


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 97, "num_hidden_layers": 2, "rope_theta": 1e6}


def test_what_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data/a/x.txt", "data/x.parquet", "model/config.json", "model/tokenizer.json", "saved/state.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    stored = SIZES | {"model_type": "qwen3"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(stored))
    found = ["data.dataset_name=text", "data.data_files=[data/**/*.txt]", "model.model_name_or_path=model"]
    assert cli.main(["validate", *found, "infra.output_dir=new/run"]) == 0
    passes = ["training.num_train_epochs=2", "model.model_name_or_path=model"]
    for counted in (["data.dataset_name=data"], ["data.dataset_name=saved"], ["data.streaming=false"]):
        assert cli.main(["validate", *passes, *counted]) == 0
    assert sorted(os.listdir(tmp_path)) == ["data", "model", "saved"]  # nothing was made


def test_adapters_beside_a_model_with_fewer_special_tokens(tmp_path: Path, capsys: Output) -> None:
    stored = SIZES | {"model_type": "qwen3_seq2seq"}
    (tmp_path / "config.json").write_text(json.dumps(stored | {"sentinel_token_ids": [90, 91, 92, 93]}))
    (tmp_path / "tokenizer.json").touch()
    given = [f"model.model_name_or_path={tmp_path}", f"infra.output_dir={tmp_path / 'run'}", "model.lora.r=4"]
    for wanted, code in ((["model.num_sentinel_tokens=4"], 0), (["model.num_sentinel_tokens=6"], 2)):
        assert cli.main(["validate", *given, *wanted]) == code
    assert "has 4 sentinels and 0 mode tokens, and model.lora does not train rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", ":2: b\n      not `HOST slots=N`"),
        ("a slots=2\na slots=2\n", ":2: a\n      the host is listed twice"),
        ("a slots=8\n", "data.num_lanes=4 cannot be divided evenly among 8 ranks: use one of"),
        ("localhost slots=2\nuser@127.0.0.1 slots=2 # two hosts\n", ""),
    ],
)
def test_a_hostfile(tmp_path: Path, capsys: Output, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    validate = ["validate", QUICKSTART, "--hostfile", str(path), f"infra.output_dir={tmp_path}"]
    assert cli.main(validate) == (2 if message else 0)
    shown = capsys.readouterr().err
    assert message in shown
    assert str(path) in shown or not message
    assert cli.main([*validate, "--elsewhere"]) == (2 if message else 0)


def test_variables_for_other_hosts_that_deepspeed_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("HF_HOME=/data\n\nA=b\n# why\n")
    validate = ["validate", QUICKSTART, "--hostfile", "hosts", "infra.output_dir=run"]
    assert cli.main(validate) == 2
    shown = capsys.readouterr().err
    assert [f"{tmp_path}/.deepspeed_env:{line}: " in shown for line in (1, 2, 3, 4)] == [False, True, False, True]
    (tmp_path / ".deepspeed_env").write_text("HF_HOME=/data\n")
    assert cli.main(validate) == 0


def test_files_that_are_trained_and_evaluated_on_are_warned_of(tmp_path: Path, capsys: Output) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"instruction": "a", "input": "", "output": "b"}\n')
    (tmp_path / "link.json").symlink_to(tmp_path / "b.json")
    files = [f"infra.output_dir={tmp_path}/run", "data.dataset_name=json", f"data.data_files={tmp_path}/b.json"]
    for name, is_warned in {"link": True, "a": False}.items():
        options = [*files, f"data.eval_files={tmp_path}/{name}.json"]
        assert cli.main(["validate", "--config", "quickstart_sft.yaml", *options]) == 0
        shown = capsys.readouterr().out
        assert (f"warning: data.eval_files: {tmp_path.resolve()}/b.json: it is also trained on" in shown) is is_warned
