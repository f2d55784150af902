"""Finding the function of the user's own that makes records of records (`data.converter`)."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from ds_encdec.types import ConfigError


def load_converter(name: str) -> Callable[[dict[str, Any]], Any]:
    """The function that `MODULE:FUNCTION` names, of a module in the working folder or an installed one.

    Raises ConfigError.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"data.converter={name} cannot be imported from {os.getcwd()} or an installed package "
            f"({type(error).__name__}: {error}). Write `module:function`"
        ) from error
    if not hasattr(found, "__code__"):
        raise ConfigError(f"data.converter={name} is of type {type(found).__name__}, and no function written in Python")
    if not os.path.isfile(found.__code__.co_filename):
        raise ConfigError(
            f"data.converter={name}: its code is in no file ({found.__code__.co_filename}), so a change of it would go "
            "unnoticed. Write it into a module that is a file"
        )
    return found
