"""In which order the pieces of an overlap group are taken."""

from __future__ import annotations

from itertools import pairwise

from piper_core.schedule.open import _turns

COMPUTE, TALK = True, False


def test_members_alternate_and_collectives_follow_what_computes_before_them() -> None:
    forward = [TALK, COMPUTE, TALK, TALK, COMPUTE, TALK]
    backward = [COMPUTE, TALK, COMPUTE, TALK, TALK]
    taken = _turns([forward, backward])
    assert taken == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (0, 4), (0, 5), (1, 2), (1, 3), (1, 4)]


def test_of_the_member_with_fewer_pieces_no_two_come_one_after_the_other() -> None:
    for few, many in ((1, 4), (3, 4), (5, 13), (7, 8)):
        taken = [member for member, _ in _turns([[COMPUTE] * few, [COMPUTE] * many])]
        assert all((a, b) != (0, 0) for a, b in pairwise(taken)), (few, many)
        assert sorted(taken) == [0] * few + [1] * many
