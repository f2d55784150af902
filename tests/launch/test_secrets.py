"""Keys planted in every door of a real run: none gets into a file, a line of output, or a process's title."""

import os
import subprocess
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


def in_files(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    return [str(path) for path in files if KEY.encode() in path.read_bytes() or KEY in path.name]


@pytest.mark.parametrize("resumes", [False, True], ids=["begins", "goes on"])
def test_no_output_of_a_run_holds_a_key_of_its_environment(
    resumes: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "planted"
    folder.mkdir(exist_ok=True)
    changes: dict[str, Any] = {
        "infra__upload_to": f"file://{folder}/there",
        "training__report_to": "[tensorboard,wandb]",
    }
    changes |= {"data__preprocessing_num_workers": 1, "training__num_train_steps": 9 if resumes else 6}
    settings = overrides(folder / "run", **changes)
    command = [*launcher("torchrun"), "--config", QUICKSTART, *settings, *["--resume", "auto"] * resumes]
    variables = environment() | VARIABLES | {"WANDB_MODE": "offline"}
    titles = set()
    with open(folder / f"output-{resumes}", "w+") as output:
        program = psutil.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
        while program.poll() is None:
            for process in program.children(recursive=True):
                try:
                    titles.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue
            psutil.wait_procs([program], timeout=0.1)
        output.seek(0)
        assert program.wait() == 0, output.read()
    assert cli.main(["report", str(folder / "run")]) == 0
    assert any("ds_encdec" in title and "workers" in title for title in titles), titles
    assert not [title for title in titles if KEY in title]
    copied, kinds = [*(folder / "there").rglob("manifest.json")], {path.suffix for path in folder.rglob("*")}
    assert copied
    assert {".wandb", ".html", ".safetensors", ".yaml"} <= kinds
    assert [path for path in folder.rglob("*") if "tfevents" in path.name]
    assert not in_files(folder)


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
    shown = "".join(capfd.readouterr())
    assert "FSSPEC_FTP_PASSWORD" in shown
    assert KEY not in shown + str(raised.value)
    assert os.listdir(tmp_path) == ["own.yaml"]
