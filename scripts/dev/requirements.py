"""Prints what pip is to install, from the ranges in pyproject.toml, one requirement a line.

`oldest NAME...` and `newest NAME...`: these packages, at the lower end of their ranges or within them. `oldest` alone:
all whose ranges have upper ends. `beyond`: every package, extras of developers as well, without the upper ends.
"""

import platform
import sys

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ds_encdec.base.foreign_places import known_ranges, range_of


def lines(which: str, names: list[str]) -> list[str]:
    ranges = known_ranges()
    if which == "newest":
        return [f"{name}{range_of(name)}" for name in names]
    if which == "oldest":
        names = names or [name for name, one in ranges.items() if "<" in str(one.specifier)]
        return [f"{name}=={_lowest(ranges[name])}" for name in names]
    left_out = {"flash-attn"} | ({"triton"} if platform.system() != "Linux" else set())  # the first is built on GPUs
    return [_without_upper_end(one) for name, one in ranges.items() if name not in left_out]


def _lowest(requirement: Requirement) -> str:
    return next(bound.version for bound in requirement.specifier if bound.operator == ">=")


def _without_upper_end(requirement: Requirement) -> str:
    kept = SpecifierSet(",".join(str(bound) for bound in requirement.specifier if not bound.operator.startswith("<")))
    return f"{requirement.name}{kept}"


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1], sys.argv[2:])))
