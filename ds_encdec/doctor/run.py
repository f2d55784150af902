"""`ds-encdec doctor` tells whether hosts can do what a run will ask of them, before it is asked.

One process looks at its host. Ranks that a launcher has started (`srun ds-encdec doctor`) look at theirs and then meet.
With a host file it starts a rank on each host by ssh, as DeepSpeed's launcher would.
"""

import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ds_encdec.config.hostfile import read_hosts, read_variables
from ds_encdec.config.schema import load_config
from ds_encdec.doctor.checks import Finding, Host, look
from ds_encdec.doctor.meeting import together
from ds_encdec.launch.world import discover

MEETING_SECONDS = 180.0  # one rank of each host looks first, where without a network the hub is asked again and again
START_SECONDS = 300.0  # in which a rank started by ssh has to answer
PORT = 29500  # the default of DeepSpeed's launcher
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
NO_LAUNCHER_BY_SSH = (
    "DeepSpeed's launcher needs ssh to each host, this one as well: start sshd and install a key, or, where the host "
    "file names this host alone, add --no_ssh_check --master_addr 127.0.0.1"
)


def look_here(files: Sequence[Any]) -> tuple[list[Finding], bool]:
    """The findings about this process's host and, among several ranks, about all; and whether this rank tells them.

    `files`: what `load_config` takes. Raises ConfigError for a wrong configuration or environment.
    """
    world = discover(os.environ)
    host = Host(load_config(*files), tuple(files), world)
    own = look(host) if world.local_rank == 0 else []
    if world.world_size == 1:
        return own, True
    findings = together(host, own, timedelta(seconds=MEETING_SECONDS))
    met = all(finding.check != "meeting" for finding in findings)
    return findings, world.is_main or not met


def look_at_hosts(hostfile: Path, files: Sequence[Any]) -> list[Finding]:
    """The findings about all hosts of `hostfile`, by a rank on each. Raises ConfigError for either's mistakes."""
    load_config(*files, hostfile=hostfile)
    hosts = list(read_hosts(hostfile, []))
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = dict(zip(hosts, pool.map(lambda host: _by_ssh(host, "hostname -I", 30), hosts), strict=True))
        findings = [
            _no_ssh(host, hostfile, _last(answer.stderr) or f"exit code {answer.returncode}")
            if answer.returncode
            else Finding("ssh", host, True, answer.stdout.strip())
            for host, answer in answers.items()
        ]
        there = [host for host, answer in answers.items() if answer.returncode == 0]
        if not there:
            return findings + look_here(files)[0]
        address = next(iter(answers[there[0]].stdout.split()), there[0])
        commands = [_command(rank, len(there), address, files) for rank in range(len(there))]
        reports = list(pool.map(_by_ssh, there, commands, [START_SECONDS] * len(there)))
    for host, report in zip(there, reports, strict=True):
        findings += _read(host, report)
    return findings


def _no_ssh(host: str, hostfile: Path, why: str) -> Finding:
    """The finding about a host that ssh did not reach."""
    unknown = f"write your own hosts into {hostfile} in place of {host}, or make its name known (DNS, /etc/hosts)"
    return Finding("ssh", host, False, why, unknown if "Could not resolve" in why else NO_LAUNCHER_BY_SSH)


def _by_ssh(host: str, command: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run([*SSH, host, command], capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(SSH, 127, "", "ssh is not installed here")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(SSH, 1, "", f"no answer within {seconds:.0f} s")


def _command(rank: int, ranks: int, address: str, files: Sequence[Any]) -> str:
    """The words that a host is to run: this program, in this folder, with what DeepSpeed's launcher would hand on."""
    path, overrides, deepspeed_config = files
    place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": os.environ.get("MASTER_PORT", PORT)}
    handed_on = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    variables = (f"{name}={value}" for name, value in {**handed_on, **read_variables([]), **place}.items())
    words = [sys.executable, "-m", "ds_encdec.cli", "doctor", "--json", *(["--config", str(path)] if path else [])]
    words += ["--deepspeed_config", str(deepspeed_config)] if deepspeed_config else []
    return f"cd {shlex.quote(os.getcwd())} && env {shlex.join([*variables, *words, *overrides])}"


def _read(host: str, report: "subprocess.CompletedProcess[str]") -> list[Finding]:
    """The findings that a rank has told: none, where another one did for it."""
    try:
        return [Finding(**finding) for finding in json.loads(report.stdout)["findings"]]
    except ValueError:
        if report.returncode in (0, 10) and not report.stdout.strip():
            return []
        why = _last(report.stderr) or "no word"
        return [Finding("start", host, False, f"exit code {report.returncode}: {why}", "the same path on each host")]


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def as_json(findings: Sequence[Finding]) -> str:
    """One object: whether all passed, and every finding."""
    passed = all(finding.passed for finding in findings)
    return json.dumps({"passed": passed, "findings": [asdict(finding) for finding in findings]}, indent=2)


def describe(findings: Sequence[Finding], width: int) -> str:
    """The findings in lines of `width` columns; hosts of which the same was found share them."""
    hosts = {finding.host for finding in findings if finding.host}
    shared: dict[str, dict[Finding, list[str]]] = {}
    for finding in findings:
        alike = shared.setdefault(finding.check, {})
        alike.setdefault(replace(finding, host=""), []).append(finding.host)
    lines, indent = [], " " * (3 + max(map(len, shared)))
    for check, alike in shared.items():
        for finding, on in alike.items():
            where = f" ({', '.join(on)})" if any(on) and len(on) < len(hosts) else ""
            start = f"{'✓' if finding.passed else '✗'} {check}".ljust(len(indent))
            lines += textwrap.wrap(f"{finding.message}{where}", width, initial_indent=start, subsequent_indent=indent)
            if finding.fix:
                lines += textwrap.wrap(
                    finding.fix, width, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  "
                )
    return "\n".join(lines)
