"""Host files, and the variables for other hosts, as DeepSpeed's launcher reads both (deepspeed/launcher/runner.py).

It stops with a traceback at some mistakes, goes on without a word at the rest, and knows of no devices. Scripts ask for
what is read: `python -m ds_encdec.config.hostfile FILE` prints `HOST SLOTS` lines; without FILE, `NAME=value` ones.
Mistakes become `problems`.
"""

import os
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from ds_encdec.config.rules import Sections
from ds_encdec.config.settings import Problem
from ds_encdec.config.shares import unevenness
from ds_encdec.config.shipped import find_shipped
from ds_encdec.config.yaml_text import file_problem, read_text
from ds_encdec.quantities import count
from ds_encdec.types import ConfigError

_HOST = re.compile(r"(\S+)\s+slots=(\d{1,9})(?!\d)")


def read_hosts(path: Path, problems: list[Problem]) -> dict[str, tuple[int, int]]:
    """The slots and the line of each host in the file `path`, or in the shipped one of that name."""
    path = find_shipped(path) or path
    text, hosts = read_text(path, problems), dict[str, tuple[int, int]]()
    for number, line in enumerate(map(str.strip, (text or "").splitlines()), start=1):
        found = _HOST.match(line)
        if not line or line.startswith("#"):
            continue
        if found is None or found[1] in hosts:
            message = "not `HOST slots=N`" if found is None else "the host is listed twice"
            problems.append(file_problem(path, message, number, field=line if found is None else found[1]))
        else:
            hosts[found[1]] = int(found[2]), number
    if text is not None and not any(slots for slots, _ in hosts.values()):
        problems.append(file_problem(path, "no host has a slot; write `HOST slots=N` lines"))
    return hosts


def read_variables(problems: list[Problem]) -> dict[str, str]:
    """The variables for other hosts, of .deepspeed_env (or DS_ENV_FILE) at home and, which goes before, that here."""
    name, variables = os.environ.get("DS_ENV_FILE", ".deepspeed_env"), dict[str, str]()
    for path in dict.fromkeys((Path.home().absolute() / name, Path(name).absolute())):
        text = read_text(path, problems) if path.is_file() else None
        for number, line in enumerate((text or "").splitlines(), start=1):
            variable, equals, value = line.partition("=")
            if equals:
                variables[variable.strip()] = value.strip()
            else:
                message = "not `NAME=value`: DeepSpeed takes neither blank lines nor comments there; remove the line"
                problems.append(file_problem(path, message, number, field=line or "a blank line"))
    return variables


def check_hostfile(path: Path, config: Sections, problems: list[Problem], *, looks_here: bool) -> None:
    """Append to `problems` what is wrong with the file `path` for the run `config`.

    `looks_here`: its hosts must be known to this machine; those that are this machine must have as many GPUs as slots,
    where it has GPUs; and the variables for other hosts (.deepspeed_env) must be such that DeepSpeed can read them.
    """
    hosts = read_hosts(path, problems)
    ranks = sum(slots for slots, _ in hosts.values())
    if ranks and (wrong := unevenness(config, ranks)):
        problems.append(file_problem(path, wrong))
    if not looks_here:
        return
    for host, (_, line) in hosts.items():
        if not _addresses(host):
            message = f"this machine knows no host of that name: try `ssh {host} hostname`, or correct it"
            problems.append(file_problem(path, message, line, field=host))
    here = [host for host in hosts if any(map(_is_mine, _addresses(host)))]
    asked, devices = sum(hosts[host][0] for host in here), 0 if config.infra.device == "cpu" else _count_gpus()
    if 0 < devices < asked:
        message = f"slots={asked}, but this machine has {count(devices, 'GPU')}: write slots={devices}"
        problems.append(file_problem(path, message, hosts[here[-1]][1], field=", ".join(here)))
    if len(hosts) > 1:
        read_variables(problems)


@cache
def _addresses(host: str) -> frozenset[str]:
    """The addresses of `host`, also where only ssh's own configuration knows it; none for an unknown one."""
    name = host.rpartition("@")[2]
    return _resolved(name) or _resolved("".join(re.findall(r"(?m)^hostname (\S+)$", _output("ssh", "-G", "--", name))))


def _resolved(name: str) -> frozenset[str]:
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return frozenset()


def _is_mine(address: str) -> bool:
    """True for an address of this machine: only there can a socket be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def _count_gpus() -> int:
    """GPUs of this machine that nvidia-smi lists; 0 where there is none."""
    return len(re.findall(r"(?m)^GPU \d+", _output("nvidia-smi", "-L")))


def _output(*command: str) -> str:
    """The output of a program; empty where it is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def _tell(hostfile: Path | None) -> int:
    """Print what scripts ask for; returns the exit code."""
    problems: list[Problem] = []
    if hostfile is None:
        lines = [f"{name}={value}\n" for name, value in read_variables(problems).items()]
    else:
        lines = [f"{host} {slots}\n" for host, (slots, _) in read_hosts(hostfile, problems).items()]
    sys.stdout.writelines(lines)
    sys.stderr.writelines(f"error: {str(problem).strip()}\n" for problem in problems)
    return ConfigError.exit_code if problems else 0


if __name__ == "__main__":
    sys.exit(_tell(Path(sys.argv[1]) if sys.argv[1:] else None))
