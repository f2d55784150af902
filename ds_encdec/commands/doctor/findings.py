"""Check hosts before a run (`ds-encdec doctor`). One process checks its host. Ranks that a launcher has started (`srun
ds-encdec doctor`) check theirs, then connect: they compare versions, look for one shared folder and measure an
all_reduce. With a host file it starts a rank on each host by ssh, as DeepSpeed's launcher would."""

import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from ds_encdec.base.findings import Finding
from ds_encdec.base.types import DsEncDecError
from ds_encdec.commands.doctor.checks import Host, look
from ds_encdec.config.hostfile import read_hosts, read_variables
from ds_encdec.config.schema import read_config
from ds_encdec.launch.agreement import differences, versions
from ds_encdec.launch.host_collectives import HostCollectives, attempt
from ds_encdec.launch.preemption import awaited
from ds_encdec.launch.process_group import choose_device, init_process_group, shutdown
from ds_encdec.launch.world import discover
from ds_encdec.registry.engines import ENGINES

MEETING_SECONDS = 180.0  # one rank per host checks it before, and without a network repeats requests to the hub
START_SECONDS = 300.0  # limit for the report of a rank started by ssh
ConfigFiles = tuple[Path | None, Sequence[str], Path | None]
"""A file, settings, and a raw DeepSpeed JSON, as `read_config` takes them."""
KEYS = ("check", "host", "passed", "message", "fix")
"""Fields of a finding in JSON."""
CALLS = 5  # of all_reduce; the report has their median
NUM_BYTES = {"cuda": 2**26, "cpu": 2**24}
SEEN_WITHIN_SECONDS = 10.0  # network file systems show other hosts' files a little later
PORT = 29500  # the default of DeepSpeed's launcher
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
NO_LAUNCHER_BY_SSH = (
    "DeepSpeed's launcher needs ssh to each host, this one as well: start sshd and install a key, or, where the host "
    "file names this host alone, add --no_ssh_check --master_addr 127.0.0.1"
)


def look_here(files: ConfigFiles) -> tuple[list[Finding], bool]:
    """Return the findings about this host and, among several ranks, about all; and whether this rank prints them. Every
    rank calls it: several ranks form a process group. Raises ConfigError for a wrong configuration or environment."""
    world = discover(os.environ)
    loaded = read_config(*files)
    loaded.valid()
    host = Host(loaded, world)
    own = look(host) if world.local_rank == 0 else []
    if world.world_size == 1:
        return own, True
    findings = _together(host, own, timedelta(seconds=MEETING_SECONDS))
    met = all(finding.check != "meeting" for finding in findings)
    return findings, world.is_main or not met


def look_at_hosts(hostfile: Path, files: ConfigFiles) -> list[Finding]:
    """Return the findings about all hosts of `hostfile`, by a rank on each. Raises ConfigError for mistakes in
    files."""
    loaded = read_config(*files)
    loaded.check_hosts(hostfile)
    loaded.valid()
    hosts = list(read_hosts(hostfile, []))
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = dict(zip(hosts, pool.map(lambda host: _by_ssh(host, "hostname -I", 30), hosts), strict=True))
        findings = [
            _no_ssh(host, hostfile, _last(answer.stderr) or f"exit code {answer.returncode}")
            if answer.returncode
            else Finding("ssh", True, answer.stdout.strip(), host=host)
            for host, answer in answers.items()
        ]
        reachable = [host for host, answer in answers.items() if answer.returncode == 0]
        if not reachable:
            return findings + look_here(files)[0]
        address = next(iter(answers[reachable[0]].stdout.split()), reachable[0])
        commands = [_command(rank, len(reachable), address, files) for rank in range(len(reachable))]
        reports = list(pool.map(_by_ssh, reachable, commands, [START_SECONDS] * len(reachable)))
    for host, report in zip(reachable, reports, strict=True):
        findings += _read(host, report)
    return findings


def _no_ssh(host: str, hostfile: Path, why: str) -> Finding:
    unknown = f"write your own hosts into {hostfile} in place of {host}, or make its name known (DNS, /etc/hosts)"
    fix = unknown if "Could not resolve" in why else NO_LAUNCHER_BY_SSH
    return Finding("ssh", False, why, fix, host)


def _by_ssh(host: str, command: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run([*SSH, host, command], capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(SSH, 127, "", "ssh is not installed here")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(SSH, 1, "", f"no answer within {seconds:.0f} s")


def _command(rank: int, ranks: int, address: str, files: ConfigFiles) -> str:
    """Return the command for a host: this program, in this folder, with the variables that DeepSpeed would pass."""
    path, overrides, deepspeed_config = files
    place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": os.environ.get("MASTER_PORT", PORT)}
    python_variables = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    variables = (f"{name}={value}" for name, value in {**python_variables, **read_variables([]), **place}.items())
    words = [sys.executable, "-m", "ds_encdec.cli", "doctor", "--json", *(["--config", str(path)] if path else [])]
    words += ["--deepspeed_config", str(deepspeed_config)] if deepspeed_config else []
    return f"cd {shlex.quote(os.getcwd())} && env {shlex.join([*variables, *words, *overrides])}"


def _read(host: str, report: "subprocess.CompletedProcess[str]") -> list[Finding]:
    """Return the findings that a rank has printed; empty if another rank printed them."""
    try:
        return [Finding(**finding) for finding in json.loads(report.stdout)["findings"]]
    except ValueError:
        if report.returncode in (0, 10) and not report.stdout.strip():
            return []
        why = f"exit code {report.returncode}: {_last(report.stderr) or 'no output'}"
        return [Finding("start", False, why, "install this environment at the same path on each host", host)]


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _together(host: Host, own: list[Finding], timeout: timedelta) -> list[Finding]:
    """Return the findings of all hosts and of their connection, on every rank, or `own` and why they do not connect. A
    collective: every rank calls it."""
    try:
        # A rank without the configured GPU joins on its CPU, and the comparison reports it.
        device = attempt(lambda: choose_device(host.config.infra.device, host.world))[0] or torch.device("cpu")
        settings = host.config.model_dump(mode="json")
        init_process_group(host.world, device, timeout, "fsdp", meeting="doctor", settings=settings)
        everyone = HostCollectives(timeout)
        findings = [finding for found in everyone.gather(own) for finding in found]
        hosts = dict(enumerate(everyone.gather(socket.gethostname())))
        findings += [_same_versions(host, hosts, everyone), _one_folder(host, hosts, everyone), _speed(device)]
    except Exception as error:
        return [*own, Finding("meeting", False, f"{type(error).__name__}: {error}", host=socket.gethostname())]
    shutdown()
    return findings


def _same_versions(host: Host, hosts: dict[int, str], everyone: HostCollectives) -> Finding:
    """Compare all versions that a run compares, to their last part. A collective: every rank calls it."""
    found = everyone.gather(versions(ENGINES, nccl=host.uses_gpus))
    if lines := differences(dict(enumerate(found)), hosts):
        return Finding("equal versions", False, "; ".join(lines), "install the same on all hosts")
    return Finding("equal versions", True, f"{len(found)} ranks agree")


def _one_folder(host: Host, hosts: dict[int, str], everyone: HostCollectives) -> Finding:
    """Check that every rank sees a file that rank 0 writes to the output folder. A collective: every rank calls it."""
    try:
        with ExitStack() as opened:
            path = everyone.on_rank_zero(
                lambda: Path(
                    opened.enter_context(NamedTemporaryFile(dir=host.output, prefix=".ds-encdec-doctor-")).name
                )
            )
            # Listing the folder makes a network file system refresh its view.
            sees = awaited(
                SEEN_WITHIN_SECONDS, lambda: path.name in (attempt(lambda: os.listdir(path.parent))[0] or ())
            )
            blind = sorted({hosts[rank] for rank, can in enumerate(everyone.gather(sees)) if not can})
    except DsEncDecError as error:
        return Finding("shared folder", False, f"{hosts[0]} cannot write there: {error}", "see `output folder`")
    if not blind:
        return Finding("shared folder", True, f"every rank sees what rank 0 writes to {path.parent}")
    message = f"{path.parent}: {', '.join(blind)} do not see what {hosts[0]} writes there"
    return Finding("shared folder", False, message, "mount one folder on all hosts, and set infra.output_dir to it")


def _speed(device: torch.device) -> Finding:
    """Measure an all_reduce in nccl-tests' bus bandwidth, each rank's rate. A collective: every rank calls it."""
    ranks = dist.get_world_size()
    numbers = torch.zeros(NUM_BYTES[device.type] // 4, device=device)
    seconds = []
    for _ in range(1 + CALLS):
        began = time.monotonic()
        dist.all_reduce(numbers)
        numbers[0].item()  # waits for the result
        seconds.append(time.monotonic() - began)
    rate = 2 * (ranks - 1) / ranks * NUM_BYTES[device.type] / statistics.median(seconds[1:])
    what = f"{NUM_BYTES[device.type] // 2**20} MiB over {ranks} ranks ({dist.get_backend()})"
    return Finding("all_reduce", True, f"{what}: {rate / 1e9:.2f} GB/s each")


def as_json(findings: Sequence[Finding]) -> str:
    """Return one JSON object: whether all passed, and every finding."""
    rows = [{name: getattr(finding, name) for name in KEYS} for finding in findings]
    return json.dumps({"passed": all(finding.passed for finding in findings), "findings": rows}, indent=2)
