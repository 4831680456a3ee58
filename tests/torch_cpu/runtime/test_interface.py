"""Which interface has an address."""

from __future__ import annotations

from piper_core.runtime.interface import interface_of


def test_the_loopback() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.250") is None
    assert interface_of("no address") is None
