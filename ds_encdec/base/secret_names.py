"""Recognises the names of settings, options and variables that hold secrets, whose values are never printed."""

import re

SECRET = (
    r"secret|passw|passphrase|pass(?![a-z])|pwd|credential|auth(?!or(?!iz))|bearer|token(?!s|iz)"
    r"|key(?:[_-]?(?:id|file|path))?(?![\w.-])"
)
"""A pattern for a part of each such name, in any case; `num_tokens`, tokenizers and authors do not match."""


def is_secret(name: str) -> bool:
    """Return whether `name` is the name of a secret."""
    return re.search(SECRET, name, re.IGNORECASE) is not None
