"""Holds the results of checks that are made before a run, and formats them."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, on one `host` if it is about hosts: the observation, and the fix if it failed. A
    `skipped` check has not passed. `values`: its figures by name."""

    check: str
    passed: bool
    message: str
    fix: str = ""
    host: str = ""
    skipped: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


def describe(findings: Sequence[Finding], width: int = sys.maxsize, column: int = 0) -> str:
    """Return the findings in lines of `width` columns, messages from `column` on; hosts with the same one share it."""
    hosts = {finding.host for finding in findings if finding.host}
    indent = " " * max(column, 3 + max(len(finding.check) for finding in findings))
    shared: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in sorted(findings, key=lambda one: [other.check for other in findings].index(one.check)):
        mark = "✓" if finding.passed else "-" if finding.skipped else "✗"
        shared.setdefault((finding.check, mark, finding.message, finding.fix), []).append(finding.host)
    lines = []
    for (check, mark, message, fix), on in shared.items():
        where = f" ({', '.join(on)})" if any(on) and len(on) < len(hosts) else ""
        start = f"{mark} {check}".ljust(len(indent))
        lines += textwrap.wrap(f"{message}{where}", width, initial_indent=start, subsequent_indent=indent)
        if fix:
            lines += textwrap.wrap(fix, width, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  ")
    return "\n".join(lines)
