"""The words of other tools: which field of ours each stands for, or why there is none.

`rewording.py` reads the rows, and docs/coming-from.md is made of them (scripts/config_reference.py). A row is right for
everyone who uses its names, or it says what to decide: a wrong guess is worse than none.
"""

from collections.abc import Iterator

from ds_encdec.config.data_words import DATA_WORDS
from ds_encdec.config.machine_words import MACHINE_WORDS
from ds_encdec.config.training_words import TRAINING_WORDS
from ds_encdec.config.words import Word

WORDS: tuple[Word, ...] = (*TRAINING_WORDS, *MACHINE_WORDS, *DATA_WORDS)


def by_name() -> Iterator[tuple[str, Word]]:
    """Yield each name with its row."""
    for row in WORDS:
        for name in row.names.split():
            yield name, row
