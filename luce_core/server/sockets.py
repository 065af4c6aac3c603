"""What the operating system is told about sockets and open files."""

from __future__ import annotations

import errno
import resource
import socket
from typing import Any

RECEIVED_BYTES = 256 << 10
"""In the kernel, not read yet. Left alone it grows to megabytes, and what all sockets may have together is
limited: many that are not read then slow down every other.
"""
UNSENT_BYTES = 128 << 10  # in the kernel, per connection; a stream is a few kB a second
OPEN_FILES = 1 << 16  # where the system sets no limit
OWN_FILES = 128  # of the process itself: model, libraries, pipes, and connections about to be refused


def tune(sock: Any, gone_s: float) -> None:
    """Notice hosts that vanished, and keep what waits to be sent out of the kernel. Linux has all of it."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES),
    ]
    wanted = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_NOTSENT_LOWAT": UNSENT_BYTES}
    if gone_s:
        wanted["TCP_USER_TIMEOUT"] = int(1e3 * gone_s)
    options += [
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in wanted.items()
        if hasattr(socket, name)
    ]
    for level, option, value in options:
        try:
            sock.setsockopt(level, option, value)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ECONNRESET):  # it is gone already
                raise


def most_connections() -> int:
    """As many as this process may have open files, less some for itself; that limit is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, max(soft, most) - OWN_FILES)
