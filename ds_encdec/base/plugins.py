"""Imports users' code: an object `module:name` from the working folder or an installed package (docs/library.md)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from contextlib import suppress
from sysconfig import get_paths
from traceback import extract_tb
from typing import Any

from ds_encdec.base.types import ConfigError

PYTHON = "python:"  # the beginning of a data set's name that stands for a reader in the user's code
# The arguments of each kind of part, in their order (docs/library.md).
_CALLED_WITH = {
    "metrics": ("predictions", "references"),
    "losses": ("logits", "labels"),
    "schedules": ("update_index", "training"),
    "sinks": ("config", "logging_dir", "start_step"),
    "callbacks": ("config",),
}


def is_dotted(name: str) -> bool:
    """Return whether `name` has the form `module:name`."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), attribute])


def load_plugin(field: str, name: str, kind: str | None = None) -> Any:
    """Import the object `module:name` that is the value of `field`; a library's module goes before the user's. Raises
    ConfigError, also if the object cannot be called with the arguments of its `kind`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.removeprefix(PYTHON).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"{field}={name} cannot be imported from {os.getcwd()} or an installed package "
            f"({type(error).__name__}: {error}){_which(module)}. Write `module:function`"
        ) from error
    if given := _CALLED_WITH.get(kind or ""):
        try:
            inspect.signature(found).bind(*given)
        except TypeError as error:
            raise ConfigError(f"{field}={name} must be a function of ({', '.join(given)}): {error}") from error
        except ValueError:  # it is written in C
            pass
    return found


def _which(module: str) -> str:
    """Return a message's end that names Python's file for `module`, which may hide one in the working folder."""
    with suppress(Exception, SystemExit):  # of packages around it
        if (spec := importlib.util.find_spec(module)) is not None:
            return f"; {module} is {spec.origin}"
    return ""


def whose_fault(error: BaseException, *, or_library: bool = True) -> str:
    """Return `TypeError: message (file.py:12)`: an error, and the last line of the user's code that was running.
    Without such a line the place is the library's, or missing with `or_library=False`."""
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((ours, "<"))]
    libraries = ("site-packages", "dist-packages", get_paths()["stdlib"].strip(os.sep))
    theirs = [frame for frame in frames if not any(f"{os.sep}{name}{os.sep}" in frame.filename for name in libraries)]
    if or_library and not theirs:
        theirs = frames
    where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{where}"


def converter_digest(name: str) -> str:
    """The digest of the code of `data.converter`, the user's function. Raises ConfigError."""
    return code_digest("data.converter", name, load_plugin("data.converter", name))


def code_digest(field: str, name: str, found: Any) -> str:
    """Return a digest of the file that defines `found`, which changes with it. Raises ConfigError without a file."""
    try:
        with open(inspect.getfile(inspect.unwrap(found)), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except (TypeError, OSError) as error:
        raise ConfigError(
            f"{field}={name}: its code is in no file ({error}), so a change would go unnoticed. Move it to a file"
        ) from error
