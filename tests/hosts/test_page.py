"""docs/launch.md types the commands that are tried on two hosts, and tells of deaths what was seen there."""

from __future__ import annotations

from tables import LAUNCHES, PAGE, with_table


def test_the_page_is_what_the_hosts_do() -> None:
    page = PAGE.read_text()
    assert [typed for _, typed in LAUNCHES.values() if f"`{typed}`" not in page] == []
    assert with_table(page) == page, "run python tests/hosts/tables.py"
