"""The places inside other libraries: all are there, one that is missing is named, and none is used without a row."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

from ds_encdec.base import foreign_places
from ds_encdec.base.foreign_places import PLACES, Place, check, replaced, write
from ds_encdec.base.types import ConfigError
from ds_encdec.engine.deepspeed import private as deepspeed_private

PACKAGE = Path(str(foreign_places.__file__)).parents[1]
OPTIMIZER = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"


@pytest.mark.parametrize("place", sorted({*PLACES}), ids=lambda place: f"{place.owner}.{place.name}-{place.use}")
def test_every_place_is_there(place: Place) -> None:
    assert place.is_there()
    assert (PACKAGE / place.user).is_file()


@pytest.mark.parametrize("owner", ["deepspeed.runtime.bf16_optimizer", OPTIMIZER, "deepspeed.runtime.no_optimizer"])
def test_a_start_names_the_place_that_a_library_has_no_more(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    user = "engine/deepspeed/gates.py"
    monkeypatch.setattr(foreign_places, "PLACES", [Place(owner, "renamed_of_late", "read", user)])
    monkeypatch.setitem(sys.modules, "ds_encdec.engine.deepspeed.gates", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.no_optimizer", None)
    check("torch")
    with pytest.raises(ConfigError, match=rf"deepspeed \d.*: {owner} has no renamed_of_late, which .*{user}.*>=0.19.8"):
        check("deepspeed")


class Owner:
    def wait(self) -> str:
        return "own"


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


def test_a_place_that_is_missing_is_not_made_and_one_without_a_row_not_changed() -> None:
    owner = Owner()
    for change in (replaced(owner, "check_overflow", None).__enter__, lambda: write(owner, overflow=True)):
        with pytest.raises(ConfigError, match=r"deepspeed .*test_foreign_places:Owner has no (check_)?overflow, which"):
            change()
    assert vars(owner) == {}
    for change in (replaced(Owner, "__doc__", "").__enter__, lambda: write(Owner(), wait=None)):
        with pytest.raises(LookupError, match=r"no row for (__doc__|wait)"):
            change()


LISTED = {(place.user, place.name) for place in PLACES}
STANDARD = {"_exit", "_replace", "_asdict"}
"""Names of Python's own library that begin with an underscore, and are documented."""
_DOCUMENTED = """
module optimizer step was_step_applied device zero_grad gradient_clipping train destroy save_checkpoint get_lr backward
set_gradient_accumulation_boundary gradient_accumulation_steps train_batch_size lr_scheduler param_groups state defaults
"""
DOCUMENTED = {*_DOCUMENTED.split()}
"""What DeepSpeed's users know its engine and its optimizers by."""
_GIVEN = """
__cause__ __doc__ args atexit causal chunk_tokens complete data encode_special_tokens filters hidden_dtype pre_tokenizer
propagate weight_dtype width
"""
GIVEN = {*_GIVEN.split()}
"""What objects of others are given, as their libraries document it; some are autograd's own contexts."""
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
del TREES["base/foreign_places.py"]


def names_set(node: ast.AST) -> Iterator[str]:
    """The names that a statement of a class or a module, or a line with `self`, defines."""
    body = getattr(node, "body", [])
    for line in [node, *(body if isinstance(body, list) else [])]:
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line.name
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        for target in [one for above in targets for one in getattr(above, "elts", [above])]:
            if isinstance(target, ast.Name) and line is not node:
                yield target.id
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr


OWN = {name for tree in TREES.values() for node in ast.walk(tree) for name in names_set(node)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in STANDARD


def foreign_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what is not the package's own: private names, and what is read of DeepSpeed's objects."""
    of_deepspeed = "from deepspeed.runtime" in ast.unparse(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith(("ds_", "__")):
            in_private = any(map(is_private, str(node.module).split(".")))
            yield from ((node.lineno, one.name) for one in node.names if in_private or is_private(one.name))
        elif isinstance(node, ast.Import):
            parts = (part for one in node.names for part in one.name.split("."))
            yield from ((node.lineno, part) for part in parts if is_private(part))
        owner: ast.AST | None = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, field = node.args[:2]
            name = str(field.value) if isinstance(field, ast.Constant) else ""
        if owner is not None:
            read = of_deepspeed and ast.unparse(owner).split(".")[-1] in RECEIVERS and name not in DOCUMENTED
            if name and (read or (is_private(name) and name not in OWN)):
                yield node.lineno, name


RECEIVERS = ("engine", "_engine", "optimizer", "swapper", "scaler", "link", "info")
"""Names of DeepSpeed's objects in the modules that know it."""


def direct_changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what objects of others are given otherwise than by `replaced` and `write`."""
    of_deepspeed = "from deepspeed.runtime" in ast.unparse(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            own = ast.unparse(node.value) in ("self", "cls") or (node.attr in OWN and not of_deepspeed)
            if not own and node.attr not in GIVEN:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            changes = called in ("setattr", "delattr") or re.fullmatch(r"vars\(.*\)\.(update|pop|setdefault)", called)
            subject = ast.unparse(node.args[0]) if called.endswith("attr") else called
            if changes and not re.match(r"(sys\b|self\b|vars\((self|subject|options)\))", subject):
                yield node.lineno, called


@pytest.mark.parametrize("where", sorted(TREES))
def test_no_place_is_used_without_a_row(where: str) -> None:
    tree = TREES[where]
    assert [(line, name) for line, name in foreign_names(tree) if (where, name) not in LISTED] == []
    assert list(direct_changes(tree)) == [], "by foreign_places.replaced or write"


def test_a_new_place_and_a_direct_change_are_seen() -> None:
    for source in (
        "from torch._new import a",
        "hasattr(tensor, '_new')",
        "from deepspeed.runtime import b; engine.new_x",
    ):
        assert list(foreign_names(ast.parse(source))), source
    for source in ("torch.backends.new_setting = True", "setattr(optimizer, name, None)", "vars(scaler).update(new=1)"):
        assert list(direct_changes(ast.parse(source))), source


def test_tables_of_fields_have_rows() -> None:
    names = {name for _, flat, groups, _ in deepspeed_private._FLAT for name in (flat, groups)}
    assert {("engine/deepspeed/private.py", name) for name in names} <= LISTED


LIBRARIES = ("deepspeed", "torch", "transformers", "peft", "datasets")
MADE_FOR_CLASSES = {"_abc_impl", "_is_protocol", "_backward_cls"}


def test_no_private_method_is_overridden_without_a_row() -> None:
    found = set()
    for where, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.bases and where.startswith(("engine/", "model/", "evaluate/")):
                made = getattr(importlib.import_module(f"ds_encdec.{where[:-3].replace('/', '.')}"), node.name)
                theirs = [one for one in made.__mro__ if one.__module__.split(".")[0] in LIBRARIES]
                private = {*filter(is_private, vars(made))} - MADE_FOR_CLASSES
                found |= {(where, name) for name in private for one in theirs if name in vars(one)}
    assert ("engine/muon.py", "_init_group") in found
    assert found <= LISTED
