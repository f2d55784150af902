"""What run.json says about the command, its commit and its machine: without secrets, and wherever it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ds_encdec.launch.run_folder import environment_facts, git_state, masked


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py", "--token", "hunter2"], "train.py --token '***'"),
        (["train.py", "--hub-token=hunter2"], "train.py '--hub-token=***'"),
        (["train.py", "infra.wandb_api_key=hunter2"], "train.py 'infra.wandb_api_key=***'"),
        (["train.py", "HF_TOKEN=hunter2", "x.Password=hunter2"], "train.py 'HF_TOKEN=***' 'x.Password=***'"),
        (["train.py", 'x={"client_secret": "hunter2", "a": 1}'], """train.py 'x={"client_secret": ***, "a": 1}'"""),
        (["train.py", "x.password=correct horse", "--key", "a b"], "train.py 'x.password=***' --key '***'"),
        (["train.py", "data.data_files=https://me:hunter2@host/f"], "train.py 'data.data_files=https://***@host/f'"),
        (["train.py", "WANDB_API_KEY=a\nhunter2"], "train.py 'WANDB_API_KEY=***'"),
        (["train.py", "--access_key_id=hunter2", "--auth", "hunter2"], "train.py '--access_key_id=***' --auth '***'"),
        (["train.py", "x=s3://me:hun/hunter2@host/f"], "train.py 'x=s3://***@host/f'"),
        (["train.py", "x={token: 'it''hunter2', a: 1}"], """train.py 'x={token: ***, a: 1}'"""),
        (["train.py", "x={Authorization: Bearer hunter2}"], "train.py 'x={Authorization: ***}'"),
        (["train.py", "phases.full.num_tokens=5", "x.loss_chunk_tokens=8"], None),
        (["train.py", "model.tokenizer_name_or_path=gpt2", "model.architecture.num_key_value_heads=2"], None),
        (["train.py", "--config", "a.yaml", "training.seed=3"], None),
        ([], ""),
    ],
)
def test_secrets_are_masked_and_nothing_else(words: list[str], shown: str | None) -> None:
    assert masked(words) == (" ".join(words) if shown is None else shown)
    assert "hunter2" not in masked(words)


def test_the_commit_of_a_checkout_and_none_of_anything_else(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        named = ("-c", "user.name=x", "-c", "user.email=x@y")
        return subprocess.run(
            ["git", "-C", tmp_path, *named, *words], check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "package"
    package.mkdir()
    assert git_state(package) == git_state(tmp_path / "nowhere") == {}
    git("init")
    (package / "code.py").write_text("1")
    assert git_state(package) == {}, "a package that is installed in a repository is not of it"
    git("add", ".")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert git_state(package) == {"git_commit": commit, "git_dirty": False}
    (package / "code.py").write_text("2")
    assert git_state(package) == {"git_commit": commit, "git_dirty": True}


def test_the_machine_is_described_without_git_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    facts = environment_facts()
    assert "git_commit" not in facts
    assert facts["host_memory_bytes"] > 2**28
    assert {"command", "host", "device", "cpu", "python", "torch"} <= facts.keys()
