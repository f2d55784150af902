"""Every file in ds_configs/ loads, and is what its name says."""

from pathlib import Path

import pytest

from ds_encdec import cli
from ds_encdec.config.schema import FullConfig, load_config, read_config
from ds_encdec.config.shipped import find_shipped, shipped_files
from ds_encdec.memory.gpus import GPUS
from ds_encdec.memory.job import run_sizes
from ds_encdec.memory.question import EstimateRequest, planned_job
from ds_encdec.memory.variants import BATCH_FIELDS, faster, recommend, variant

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"
FILES = sorted(SHIPPED.iterdir())
FOR_GPUS = [path for path in FILES if path.match("qwen3_*.yaml") and path.stem != "qwen3_0.6b_ul2"]
"""All but the full run, which is the schema's, and needs the least of a GPU."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_file_loads(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert path.suffix in (".yaml", ".json")
    load_config(None, (), path) if path.suffix == ".json" else load_config(path)
    assert caplog.messages == []


def test_shipped_files_are_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {file.resolve() for file in shipped_files()} == {*FILES, *SHIPPED.with_name("hostfiles").iterdir()}
    (tmp_path / "quickstart").mkdir()  # a run's folder, and no configuration
    for name in ("quickstart", "quickstart.yaml", "ds_configs/quickstart.yaml"):
        assert find_shipped(Path(name)) == SHIPPED / "quickstart.yaml"
    assert find_shipped(Path("zero2")) == SHIPPED / "zero2.json"
    assert find_shipped(Path("8gpu")) == SHIPPED.with_name("hostfiles") / "8gpu"
    for kind in (str, Path):
        lanes = ["infra.sharding_stage=null", "data.num_lanes=8"]
        loaded = read_config(kind("quickstart"), lanes, kind("zero2"))
        loaded.check_hosts(kind("8gpu"))
        found = loaded.valid()
        assert (found.data.dataset_name, found.infra.sharding_stage) == ("builtin", "zero2")
    (tmp_path / "quickstart.yaml").write_text("training: {num_train_steps: 7}\n")
    assert find_shipped(Path("quickstart.yaml")) == Path("quickstart.yaml")  # one's own goes first


def test_init_lists_what_is_shipped_and_writes_one_to_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    listed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert listed["quickstart"] == "A first run that needs neither a download nor a GPU"
    assert set(listed) == {path.stem if path.suffix == ".yaml" else path.name for path in shipped_files()}

    assert cli.main(["init", "quickstart", "--out", "mine.yaml"]) == 0
    written = (tmp_path / "mine.yaml").read_text()
    assert "--module ds_encdec.train --config mine.yaml" in written
    assert "yaml-language-server" not in written  # the schema that editors look for is in the repository
    assert load_config("mine.yaml") == load_config(SHIPPED / "quickstart.yaml")
    assert cli.main(["init", "quickstart", "--out", "mine.yaml"]) == 2
    assert cli.main(["init", "quikstart"]) == 2
    assert cli.main(["validate", "quikstart"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert sum(line.endswith("; did you mean quickstart?") for line in told) == 2


def test_the_full_run_is_the_schema_and_rolls_back_an_hour_at_most() -> None:
    shipped, schema = load_config(SHIPPED / "qwen3_0.6b_ul2.yaml"), FullConfig()
    changed = {"monitor", "phases", "training"}
    assert shipped.model_dump(exclude=changed) == schema.model_dump(exclude=changed)
    assert shipped.monitor == schema.monitor.model_copy(update={"on_loss_spike": "rollback"})
    assert shipped.training == schema.training.model_copy(update={"save_interval_hours": 1})


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: path.name)
def test_settings_for_gpus_are_the_fastest_that_fit(path: Path, gpu: str) -> None:
    config = load_config(path)
    job = planned_job(config, run_sizes(config), 1, GPUS[gpu])
    fits = EstimateRequest(job, GPUS[gpu], None).fits
    assert fits(variant(job, {}))
    assert faster(job, fits) is None
    best = recommend(job, fits)
    assert best is not None
    assert best.overrides.keys() <= BATCH_FIELDS
    assert config.training.activation_checkpointing == "auto"
    assert job.config.training.activation_checkpointing == "none"
