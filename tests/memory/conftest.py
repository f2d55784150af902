"""What the tests of memory have in common."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _imports_are_passed_over() -> None:
    """Collections of garbage, which these tests ask for often, need not go through what imports have made."""
    gc.collect()
    gc.freeze()
