"""Finding what users bring: objects of modules of their own, and of installed packages.

An object is named `module:name`, of a module in the working folder or an installed one. An installed package may also
give it a plain name, by an entry point of a group of ours, such as `ds_encdec.sinks`. docs/library.md has examples.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from ds_encdec.source_kinds import PYTHON
from ds_encdec.types import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


_CALLED_WITH = {
    "metrics": ("predictions", "references"),
    "losses": ("logits", "labels"),
    "schedules": ("update_index", "training"),
    "sinks": ("config", "logging_dir", "start_step"),
    "callbacks": ("config",),
}
"""The arguments of each kind of part, in their order (docs/library.md)."""


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """The entry points of the group `ds_encdec.{kind}` by their names; nothing of theirs is imported."""
    from importlib.metadata import entry_points  # takes a while, and few ask

    return {point.name: point for point in entry_points(group=f"ds_encdec.{kind}")}


def is_dotted(name: str) -> bool:
    """Return whether `name` has the form `module:name`."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), attribute])


def unknown(names: Iterable[str], known: Iterable[str], kind: str) -> list[str]:
    """The `names` that are neither `known` nor entry points of the `kind`, nor `module:name`."""
    missing = [name for name in names if name not in known and not is_dotted(name)]
    return [name for name in missing if name not in installed(kind)] if missing else []


def load_plugin(field: str, name: str, kind: str | None = None) -> Any:
    """The object that `name` means as the value of `field`: `module:name`, or an entry point of the `kind`.

    The working folder comes last: a module in it hides none of a library. Raises ConfigError, also for what cannot be
    called as a part of the `kind` is.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.removeprefix(PYTHON).partition(":")
    try:
        if kind is not None and name in installed(kind):
            found = installed(kind)[name].load()
        else:
            found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"{field}={name} cannot be imported from {os.getcwd()} or an installed package "
            f"({type(error).__name__}: {error}){_which(module)}. Write `module:function`"
        ) from error
    if given := _CALLED_WITH.get(kind or ""):
        _require_call(f"{field}={name}", found, given)
    return found


def _require_call(what: str, found: Any, given: tuple[str, ...]) -> None:
    """Raise ConfigError where `found` cannot be called with the arguments that are called `given` here."""
    import inspect

    if not callable(found):
        raise ConfigError(f"{what} is of type {type(found).__name__}, and no function of ({', '.join(given)})")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ConfigError(f"{what} is called with ({', '.join(given)}), and takes {signature}: {error}") from error


def _which(module: str) -> str:
    """The file that Python takes for `module`, and the one of that name in the working folder, if another is taken."""
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):  # of packages around it
        return ""
    if spec is None:
        return ""
    found, own = spec.origin or "built into Python", os.path.abspath(module.replace(".", os.sep))
    file = next((path for path in (f"{own}.py", f"{own}{os.sep}__init__.py") if os.path.isfile(path)), found)
    if os.path.realpath(file) == os.path.realpath(found):
        return f"; {module} is {found}"
    return f"; {module} is {found}, and {file} is hidden by it: give that another name"


def whose_fault(error: BaseException, *, or_library: bool = True) -> str:
    """`TypeError: what it says (file.py:12)`: an error, and the last line of the user's code that was running.

    Where none was, the place is the library's, or with `or_library=False` none: then the error may be no user's.
    """
    from sysconfig import get_paths
    from traceback import extract_tb

    ours = os.path.dirname(__file__) + os.sep
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((ours, "<"))]
    libraries = ("site-packages", "dist-packages", get_paths()["stdlib"].strip(os.sep))
    theirs = [frame for frame in frames if not any(f"{os.sep}{name}{os.sep}" in frame.filename for name in libraries)]
    if or_library and not theirs:
        theirs = frames
    where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{where}"


def code_digest(field: str, name: str, found: Any) -> str:
    """A digest of the file that defines `found`, so that a change of it is noticed. Raises ConfigError without one."""
    import hashlib
    import inspect

    try:
        with open(inspect.getfile(inspect.unwrap(found)), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except (TypeError, OSError) as error:
        raise ConfigError(
            f"{field}={name}: its code is in no file ({error}), so a change of it would go unnoticed. Write it into a "
            "module that is a file"
        ) from error
