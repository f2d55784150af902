"""`ds-encdec doctor` finds, from one host, what is wrong with the others, and nothing else."""

import json
from typing import Any

from rig import Rig

DOCTOR = ("ds-encdec", "doctor", "quickstart", "--json")


def wrong(report: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(report)["findings"]:
        if not finding["passed"]:
            found.setdefault(finding["check"], []).append(finding)
    return found


def test_by_ssh(rig: Rig) -> None:
    deaf = rig.hosts[-1]
    rig.run(deaf, "pkill", "-x", "sshd")
    hostfile = rig.hostfile("node0", "node1", deaf)
    settings = ("data.num_lanes=3", f"infra.output_dir={rig.folder / 'local'}")
    asked = (*DOCTOR, "--hostfile", str(hostfile), *settings)
    done = rig.run("node0", *asked, check=False)
    assert done.returncode == 10, done.stderr
    found = wrong(done.stdout)
    assert found.keys() == {"ssh", "shared folder"}
    assert [finding["host"] for finding in found["ssh"]] == [deaf]
    assert "node1 do not see what node0 writes" in found["shared folder"][0]["message"]
