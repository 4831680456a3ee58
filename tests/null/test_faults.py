"""Of all that is heard when a run breaks, the cause is named."""

from __future__ import annotations

import pytest

from piper_core.errors import ConfigError
from piper_core.runtime.faults import Broke, Seen, broke, cause

WAIT = {0: "0RECV_B0 (wait)", 1: "1B0", 2: "2RECV_F1 (wait)"}
ECHO = broke(0, "0RECV_B0 (wait)", RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:3000"))
FAULT = broke(2, "2F1", ValueError("a bad value"))


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (Seen([ECHO, FAULT], {1: "its process died"}, WAIT, [], 9), r"rank 1 at 1B0: its process died; rank 0 at .*"),
        (Seen([ECHO, FAULT], {}, WAIT, [], 9), "rank 2 at 2F1: ValueError: a bad value"),
        (Seen([ECHO], {}, WAIT, [1], 9), "rank 1 at 1B0: stopped answering; it had 9 s; rank 0 at .*"),
        (Seen([], {}, WAIT, [], 9), "rank 1 at 1B0: did not end within 9 s, and the others wait; .*"),
        (Seen([ECHO], {}, {0: WAIT[0], 2: WAIT[2]}, [], 9), r"rank 0 at 0RECV_B0 \(wait\): RuntimeError: .*closed.*"),
        (Seen([], {}, {0: WAIT[0], 2: WAIT[2]}, [], 9), "nothing moved for 9 s; rank 0 at .*, rank 2 at .*"),
    ],
    ids=["dead", "failed", "silent", "busy", "echo", "nothing"],
)
def test_cause(seen: Seen, said: str) -> None:
    import re

    assert re.fullmatch(said, str(cause(seen)))


def test_what_is_an_echo() -> None:
    assert ECHO.echo
    assert not FAULT.echo
    assert not broke(0, "0F0", RuntimeError("mat1 and mat2 shapes cannot be multiplied")).echo
    ours = broke(0, "its start", ConfigError("the program has no rank 7"))
    assert (ours.refused, ours.echo) == (True, False)
    assert str(cause(Seen([ours], {}, {}, [], 9))) == "rank 0 at its start: the program has no rank 7"
    assert broke(0, "", ValueError("x" * 999)) == Broke(0, "", "ValueError", "x" * 300)
