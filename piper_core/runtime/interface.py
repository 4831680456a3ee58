"""The network interface through which a machine has an address."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; None where none has, or the system does not say."""
    try:
        from fcntl import ioctl
    except ModuleNotFoundError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                found = ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
