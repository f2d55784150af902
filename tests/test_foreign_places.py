"""The places inside other libraries: all are there, one that is missing is named, and none is used without a row."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_encdec import foreign_places
from ds_encdec.foreign_places import PLACES, Place, check, replaced, write
from ds_encdec.types import ConfigError

PACKAGE = Path(str(foreign_places.__file__)).parent
OPTIMIZER = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"


@pytest.mark.parametrize("place", sorted({*PLACES}), ids=lambda place: f"{place.owner}.{place.name}-{place.use}")
def test_every_place_is_there(place: Place) -> None:
    assert place.is_there()
    assert (PACKAGE / place.user).is_file()


@pytest.mark.parametrize("owner", ["deepspeed.runtime.bf16_optimizer", OPTIMIZER, "deepspeed.runtime.no_optimizer"])
def test_a_start_names_the_place_that_a_library_has_no_more(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    user = "engine/deepspeed_gates.py"
    monkeypatch.setattr(foreign_places, "PLACES", [Place(owner, "renamed_of_late", "read", user)])
    monkeypatch.setitem(sys.modules, "ds_encdec.engine.deepspeed_gates", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.no_optimizer", None)
    check("torch")
    with pytest.raises(ConfigError, match=rf"deepspeed \d.*: {owner} has no renamed_of_late, which .*{user}.*>=0.19.8"):
        check("deepspeed")


def test_a_method_counts_as_there_only_where_it_is() -> None:
    field = Place(OPTIMIZER, "bf16_groups", "read", "engine/deepspeed_private.py")
    assert field.is_there()
    assert not field._replace(use="call").is_there()


class Owner:
    def wait(self) -> str:
        return "own"


CHANGES = [lambda owner: replaced(owner, "check_overflow", None).__enter__(), lambda owner: write(owner, overflow=True)]


def test_what_is_replaced_is_back_in_whatever_order_it_ends() -> None:
    first, second = replaced(Owner, "wait", lambda _: "first"), replaced(Owner, "wait", lambda _: "second")
    native, owner = Owner.wait, Owner()
    first.__enter__()
    second.__enter__()
    assert owner.wait() == "second"
    first.__exit__(None, None, None)
    assert owner.wait() == "second"
    second.__exit__(None, None, None)
    assert Owner.wait is native
    with replaced(owner, "wait", lambda: "of one object"):
        assert owner.wait() == "of one object"
    assert vars(owner) == {}
    assert not foreign_places._layers


@pytest.mark.parametrize("change", CHANGES)
def test_a_place_that_is_missing_is_not_made(change: Any) -> None:
    owner = Owner()
    with pytest.raises(ConfigError, match=r"deepspeed .*test_foreign_places:Owner has no (check_)?overflow, which"):
        change(owner)
    assert vars(owner) == {}


def test_a_place_without_a_row_is_not_changed() -> None:
    for change in (replaced(Owner, "__doc__", "").__enter__, lambda: write(Owner(), wait=None)):
        with pytest.raises(LookupError, match=r"no row for (__doc__|wait)"):
            change()
