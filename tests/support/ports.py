"""Ports for processes that come together over loopback."""

import socket


def free_port(low=0):
    """A free port; from `low` on, if given."""
    for port in range(low, 2**16) if low else [0]:
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return s.getsockname()[1]
