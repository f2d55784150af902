"""Read host files, and the variables for other hosts, as DeepSpeed's launcher does (deepspeed/launcher/runner.py). The
launcher stops with a traceback at some mistakes and ignores the rest; here all become `problems`. For scripts, `python
-m ds_encdec.config.hostfile FILE` prints `HOST SLOTS` lines; without FILE, `NAME=value` lines."""

import os
import re
import sys
from pathlib import Path

from ds_encdec.base.types import ConfigError
from ds_encdec.config.settings import Problem
from ds_encdec.config.shipped import find_shipped
from ds_encdec.config.yaml.text import file_problem, read_text


def read_hosts(path: Path, problems: list[Problem]) -> dict[str, int]:
    """Return each host's slots from the file `path`, or from the shipped file of that name."""
    path = find_shipped(path) or path
    text, hosts = read_text(path, problems), dict[str, int]()
    for number, line in enumerate(map(str.strip, (text or "").splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        if (found := re.match(r"(\S+)\s+slots=(\d{1,9})(?!\d)", line)) is None:
            problems.append(file_problem(path, "not `HOST slots=N`", number, field=line))
        elif found[1] in hosts:
            problems.append(file_problem(path, "the host is listed twice", number, field=found[1]))
        else:
            hosts[found[1]] = int(found[2])
    if text is not None and not any(hosts.values()):
        problems.append(file_problem(path, "no host has a slot; write `HOST slots=N` lines"))
    return hosts


def read_variables(problems: list[Problem]) -> dict[str, str]:
    """Return the variables for other hosts, from .deepspeed_env (or DS_ENV_FILE) here or, if not set here, at home."""
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


if __name__ == "__main__":
    problems: list[Problem] = []
    if sys.argv[1:]:
        lines = [f"{host} {slots}\n" for host, slots in read_hosts(Path(sys.argv[1]), problems).items()]
    else:
        lines = [f"{name}={value}\n" for name, value in read_variables(problems).items()]
    sys.stdout.writelines(lines)
    sys.stderr.writelines(f"error: {str(problem).strip()}\n" for problem in problems)
    sys.exit(ConfigError.exit_code if problems else 0)
