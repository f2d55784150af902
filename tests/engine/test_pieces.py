"""Where elements of parameters lie in the flat tensors of optimizers: told once, for engines and readers."""

from __future__ import annotations

import pytest

from ds_encdec.engine.protocol import Piece, end_to_end, own_parts

NUMELS = {"a": 7, "b": 1, "c": 6}


def test_whole_parameters_follow_each_other_with_their_padding() -> None:
    assert list(end_to_end(NUMELS)) == [Piece("a", 0, 7, 0), Piece("b", 0, 1, 7), Piece("c", 0, 6, 8)]
    assert [piece.offset for piece in end_to_end(NUMELS, [1, 3, 0])] == [0, 8, 12]
    with pytest.raises(ValueError, match="shorter"):
        list(end_to_end(NUMELS, [1, 3]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_parts_of_all_ranks_are_every_element_once(ranks: int) -> None:
    """Also where a parameter has fewer elements than there are ranks."""
    parts = [list(own_parts(NUMELS, rank, ranks)) for rank in range(ranks)]
    for name, numel in NUMELS.items():
        held = [range(piece.start, piece.start + piece.length) for own in parts for piece in own if piece.name == name]
        assert [element for elements in held for element in elements] == list(range(numel))
    sizes = {name: -(-numel // ranks) for name, numel in NUMELS.items()}
    for own in parts:  # padding keeps the place of each parameter the same on all ranks
        assert all(piece.offset == sum(list(sizes.values())[: list(sizes).index(piece.name)]) for piece in own)
