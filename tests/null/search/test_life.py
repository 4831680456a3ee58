"""What rows do not compute at the ends of a step, by hand: two rows, whose every action is half communication."""

from __future__ import annotations

import numpy as np

from search.life import Stages, lives_of

TWO = Stages(
    saved=[1.0, 1.0], stash=[0.0, 0.0], forward=[2.0, 2.0], backward=[2.0, 2.0], hop=[0.0], rest=[2.0, 2.0],
    forward_work=[1.0, 1.0], backward_work=[1.0, 1.0], weight_work=[0.0, 0.0], weight=[0.0, 0.0],
)  # fmt: skip
ROOM = np.full(2, 100.0)


def idle(share: float, begun: list[float], turned: float = 2.0, room: float = 100.0) -> list[float]:
    lives = lives_of([[(0,)], [(1,)]], TWO, overlapping=True)
    held = np.full(2, room)
    return list(lives.idle(held, held, share, np.asarray(begun), turned))


def test_forwards_before_the_first_backward_and_backwards_after_the_last_forward_hide_nothing() -> None:
    """The first backward starts after 6 on row 0 and after 4 on row 1; half of that is compute, and half a second more
    of the forward that the group with it may have begun with. After its last forward row 0 goes on for 5."""
    assert idle(50, [0.0, 2.0]) == [(6 - 3.5) + (5 - 3), (2 - 1.5) + 0]


def test_a_first_microbatch_that_comes_late_keeps_rows_waiting() -> None:
    assert idle(50, [0.0, 3.0], turned=3.0)[0] == idle(50, [0.0, 2.0])[0] + 0.5
    assert idle(50, [0.0, 3.0], turned=3.0)[1] == idle(50, [0.0, 2.0])[1]


def test_rows_do_no_more_forwards_than_there_are_or_than_memory_holds() -> None:
    assert idle(50, [0.0, 2.0], room=2.0)[0] == (6 - 2) + (5 - 2)
    assert idle(1, [0.0, 2.0], room=0.5)[0] == (6 - 0.5) + (5 - 0.5)


def test_where_all_forwards_come_first_there_is_no_group() -> None:
    """One microbatch: the 5 seconds of the way down and up count once; ten of which all come first lose what they
    communicate, 20, which is more than what is lost at the ends where not all do."""
    assert idle(1, [0.0, 2.0])[0] == 6 - 1
    assert idle(10, [0.0, 2.0])[0] == (6 - 3.5) + (5 - 3)
    assert idle(2, [0.0, 2.0])[0] == 4
