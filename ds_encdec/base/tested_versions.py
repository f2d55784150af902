"""Reads the tested versions of other packages: the ranges in pyproject.toml. A range is raised only by a green run of
`scripts/dev/newest.sh`, and written nowhere else."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

_PACKAGE = "ds_encdec"


def known_ranges() -> dict[str, Requirement]:
    """Return the requirement for each package by name, including those of extras. A clone's pyproject.toml goes before
    the installed metadata, which may be older."""
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, _lines()):
        if requirement.name != _PACKAGE and requirement.specifier:
            found.setdefault(requirement.name, requirement)
    return found


def range_of(name: str) -> str:
    """Return the tested range of one package: `>=5.3,<5.25`."""
    requirement = known_ranges().get(name)
    if requirement is None:
        return "any version"
    return ",".join(sorted(map(str, requirement.specifier), key=lambda bound: bound.startswith("<")))


def outside_tested_ranges() -> list[str]:
    """Return a line for each installed package outside its range: package, version and range."""
    lines = []
    for name, requirement in known_ranges().items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lines.append(f"{name} {found} (tested: {range_of(name)})")
    return lines


def _lines() -> list[str]:
    try:
        project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
        if project["name"] == _PACKAGE:
            return sum(project["optional-dependencies"].values(), project["dependencies"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        pass  # installed from a wheel; or another project's file lies beside the packages
    return requires(_PACKAGE) or []
