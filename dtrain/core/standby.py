"""A process that waits until it replaces another one: how its supervisor starts it, and how it is started."""

import json
import os
import socket
import sys
from collections.abc import Mapping

STANDBY = "DTRAIN_STANDBY"
"""Environment variable with the number of the socket on which a process waits for its start."""


def begin(link: socket.socket, environment: Mapping[str, str], out: int, err: int) -> None:
    """Start the process at the other end, with these environment variables and files for its output. OSError if it is
    gone."""
    socket.send_fds(link, [b"!"], [out, err])
    link.sendall(json.dumps(dict(environment)).encode() + b"\n")


def await_start() -> None:
    """Wait for `begin`, and become that process; exit if the supervisor goes away instead."""
    with socket.socket(fileno=int(os.environ.pop(STANDBY))) as link:
        begun, files, _, _ = socket.recv_fds(link, 1, 2)
        if not begun:
            os._exit(0)
        with link.makefile("r") as lines:
            environment = json.loads(lines.readline())
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.update(environment)
