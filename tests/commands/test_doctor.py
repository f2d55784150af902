"""`ds-encdec doctor` finds what is planted, and nothing else."""

import json
import os
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_encdec.base.findings import Finding, describe
from ds_encdec.commands.doctor import CHECKS, Host
from ds_encdec.config.schema import read_config
from ds_encdec.launch.world import World, free_port

DOCTOR = ("-m", "ds_encdec.cli", "doctor", "--config", "quickstart", "--json")


def findings(*words: str, code: int, **how: Any) -> dict[str, list[dict[str, Any]]]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=300, **how)
    assert done.returncode == code, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is (code == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_each_planted_fault_is_found(tmp_path: Path) -> None:
    planted = {"NCCL_SOCKET_IFNAME": "nocard", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    settings = """infra.device=cuda infra.output_dir=/proc/out data.data_files=[nowhere.txt] infra.num_gpus=64
        data.dataset_name=text model.tokenizer_name_or_path=nobody/nothing
        model.architecture=null model.model_name_or_path=nobody/nothing"""
    found = findings(
        *(*DOCTOR, *settings.split()),
        code=10,
        env=os.environ | planted,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    wrong = {check: " ".join(one[0]["message"].split()) for check, one in found.items() if not one[0]["passed"]}
    expected = {
        "configuration": "no file matches nowhere.txt",
        "devices": "no CUDA device",
        "network cards": "NCCL_SOCKET_IFNAME=nocard",
        "output folder": "/proc",
        "open files": "may open 256 files",
        "model": "nobody/nothing",
    }
    assert wrong.keys() == expected.keys()
    assert {check for check, text in expected.items() if text not in wrong[check]} == set()


def test_ranks_meet_and_one_tells(tmp_path: Path) -> None:
    """The second's transformers differs in the last part alone, of which a run would only warn."""
    here = version("transformers")
    there = f"{here.rpartition('.')[0]}.99"
    (metadata := tmp_path / f"transformers-{there}.dist-info" / "METADATA").parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {there}\n")
    words = (*DOCTOR, f"infra.output_dir={tmp_path}")
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    second = os.environ | place | {"RANK": "1", "LOCAL_RANK": "1"}
    second["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen([sys.executable, *words], env=second, stdout=subprocess.PIPE) as other:
        found = findings(*words, code=10, env=os.environ | place | {"RANK": "0", "LOCAL_RANK": "0"})
        assert other.communicate(timeout=100)[0] == b""
    assert [check for check, one in found.items() if not one[0]["passed"]] == ["equal versions"]
    differing = found["equal versions"][0]
    assert differing["message"].startswith(f"transformers: {here} for rank 0 (")
    assert f", {there} for rank 1 (" in differing["message"]
    assert differing["fix"] == "install the same on all hosts"
    assert {"output folder", "shared folder"} <= found.keys()
    assert len(found["packages"]) == 1  # of the one host
    assert "over 2 ranks (gloo)" in found["all_reduce"][0]["message"]


def test_the_master_is_an_address_that_others_reach() -> None:
    def look(address: str, node: int = 1) -> Any:
        world = World(num_nodes=2, master_addr=address, node_rank=node)
        return CHECKS["master address"](Host(read_config(None), world))

    assert look("192.0.2.7") == "192.0.2.7 is 192.0.2.7"
    assert "127.0.1.1 here: this host itself" in look("127.0.1.1")[0]
    assert look("127.0.1.1", node=0) == "127.0.1.1 is 127.0.1.1"  # as Debian writes it for a machine's own name
    assert "nowhere.invalid" in look("nowhere.invalid")[0]


def test_hosts_share_a_line() -> None:
    text = describe([Finding("versions", True, "all new", host=host) for host in ("a", "b")], 80)
    assert text == "✓ versions all new"
    findings = [Finding("ssh", True, "1.2.3.4", host="a"), Finding("ssh", False, "refused", "start sshd", "b")]
    differing = describe(findings, 80)
    assert differing.splitlines() == ["✓ ssh 1.2.3.4 (a)", "✗ ssh refused (b)", "      → start sshd"]


def fake_ssh(folder: Path, answer: str) -> dict[str, str]:
    """The environment in which ssh is a script that has its last word, the command, in `$command`."""
    (ssh := folder / "ssh").write_text(f"#!/bin/sh\nfor word; do host=$command; command=$word; done\n{answer}\n")
    ssh.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}


def test_hosts_without_ssh_are_named_with_the_remedy(tmp_path: Path) -> None:
    (hostfile := tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    unknown = '[ "$host" = node0 ] && echo "ssh: Could not resolve hostname node0" >&2 && exit 255'
    environment = fake_ssh(tmp_path, f'{unknown}\necho "$host: Permission denied (publickey)." >&2; exit 255')
    found = findings(*DOCTOR, "--hostfile", str(hostfile), f"infra.output_dir={tmp_path}", code=10, env=environment)
    assert [finding["host"] for finding in found["ssh"]] == ["node0", "node1"]
    assert found["ssh"][0]["fix"].startswith(f"write your own hosts into {hostfile} instead of node0")
    assert found["ssh"][1]["message"] == "node1: Permission denied (publickey)."
    assert "--no_ssh_check" in found["ssh"][1]["fix"]
    assert found["packages"][0]["passed"]  # this host is looked at all the same


def test_the_hosts_of_a_file_are_checked_together(tmp_path: Path) -> None:
    here = '[ "$command" = "hostname -I" ] && exec echo 127.0.0.1\nexec sh -c "$command"'
    (hostfile := tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    environment = fake_ssh(tmp_path, here)
    words = (*DOCTOR, "--hostfile", str(hostfile), f"infra.output_dir={tmp_path}")
    found = findings(*words, code=10, env=environment)
    assert {check for check, one in found.items() if not all(finding["passed"] for finding in one)} == {
        "master address"
    }
    assert [finding["host"] for finding in found["ssh"]] == ["node0", "node1"]
    assert len(found["packages"]) == 2
    assert found["equal versions"][0]["message"] == "2 ranks agree"
