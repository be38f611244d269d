"""Whether this machine's own name leads to an address: libraries ask, and some of them die of the answer."""

from __future__ import annotations

import socket

from dlbench.units import utf8_text

REMEDY = "write the name into /etc/hosts (for a container: --hostname and --add-host), or ask for its entry in DNS"


def host_name_problem() -> str:
    """Why the host's own name leads to no address, one line without the remedy; empty if it does."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"the host name {utf8_text(name)!r} does not resolve on the machine itself ({reason})"
    return ""
