"""Keys planted in every door of a real run: none gets into a file, a line of output, or a process's title."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_run import QUICKSTART, environment, launcher, overrides

from ds_encdec import cli
from ds_encdec.base.types import ConfigError

pytestmark = pytest.mark.launch

KEY = "PLANTED-hunter2"
VARIABLES = dict.fromkeys(
    ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "FSSPEC_FILE_KEY", "FSSPEC_FTP_PASSWORD"), KEY
)
URLS = (f"memory://user:{KEY}@host/x", f"file:///tmp/x?sig={KEY}", f"s3://AKIA:se/{KEY}@bucket/x")


def titles_of(command: list[str], folder: Path) -> set[str]:
    """The command lines of all processes of the program while it ran, to a good end."""
    variables, titles = environment() | VARIABLES | {"WANDB_MODE": "offline"}, set[str]()
    with open(folder / "output", "a+") as output:
        program = psutil.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
        while program.poll() is None:
            for process in program.children(recursive=True):
                with suppress(psutil.Error):
                    titles.add(" ".join(process.cmdline()))
            psutil.wait_procs([program], timeout=0.1)
        output.seek(0)
        assert program.wait() == 0, output.read()
    return titles


def test_no_output_of_a_run_holds_a_key_of_its_environment(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"training__report_to": "[tensorboard,wandb]", "data__preprocessing_num_workers": 1}
    settings = overrides(tmp_path / "run", infra__upload_to=f"file://{tmp_path}/there", **changes)
    command = [*launcher("torchrun"), "--config", QUICKSTART, *settings]
    titles = titles_of(command, tmp_path)
    titles |= titles_of([*command, "--resume", "auto", "training.num_train_steps=9"], tmp_path)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert any("ds_encdec" in title and "workers" in title for title in titles), titles
    assert not [title for title in titles if KEY in title]
    files = [*tmp_path.rglob("*")]
    assert {".wandb", ".html", ".safetensors", ".yaml"} <= {path.suffix for path in files}
    assert [path for path in files if "tfevents" in path.name]
    assert [path for path in files if path.name == "manifest.json" and "there" in path.parts]
    assert not [path for path in files if KEY in path.name or (path.is_file() and KEY.encode() in path.read_bytes())]


@pytest.mark.parametrize("url", URLS)
def test_a_key_in_an_address_is_refused_by_every_door_and_never_shown(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ds_encdec.config.schema import FullConfig
    from ds_encdec.train import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(f"infra:\n  upload_to: {url}\n")
    for arguments in (
        ["--config", "own.yaml"],
        ["--config", "own.yaml", "--print-config"],
        ["--config", QUICKSTART, f"infra.upload_to={url}", "--print-config"],
        ["--config", QUICKSTART, "--upload-to", url],
        ["--config", QUICKSTART, f'data.data_files=["{url}"]'],
        ["--config", QUICKSTART, f"data.dataset_name={url}"],
    ):
        assert main(arguments) == ConfigError.exit_code, arguments
        assert (
            cli.main(["validate", *(word for word in arguments if word != "--print-config")]) == ConfigError.exit_code
        )
    with pytest.raises(ValueError, match="upload_to") as raised:
        FullConfig.model_validate({"infra": {"upload_to": url}})
    with pytest.raises(ConfigError) as refused:
        FullConfig.from_yaml("own.yaml")
    shown = "".join(capfd.readouterr())
    assert "FSSPEC_FTP_PASSWORD" in shown
    assert KEY not in shown + str(raised.value) + str(refused.value)
    assert os.listdir(tmp_path) == ["own.yaml"]
