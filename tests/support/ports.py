"""Free ports for processes that connect over loopback."""

import socket


def free_port(low=0):
    """A free port, at least `low` if that is given."""
    for port in range(low, 2**16) if low else [0]:
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return s.getsockname()[1]
