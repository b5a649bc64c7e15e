"""What answers at the address of a Ray cluster, before anything joins it."""

from __future__ import annotations

import os
import socket

from ..conf.errors import ConfigError, reason

_ANSWER_S = 3.0  # for a server at a given address to answer


def check_address(address: str) -> None:
    """Check that a given address answers as Ray does; Ray itself takes up to minutes to find that nothing does.

    Raises:
        ConfigError: nothing does, or something else.
    """
    found = _found_by_ray() if address == "auto" else address
    host, _, port = found.rpartition("://")[2].rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    hint = "" if found == address else "; start Ray there, or leave it out"
    address += f" ({found})" if hint else ""
    try:
        speaks_grpc = _speaks_grpc(host, int(port))
    except OSError as error:
        raise ConfigError(f"parallel.ray_address={address}: nothing answers there ({reason(error)}){hint}") from error
    if not speaks_grpc and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ConfigError(f"parallel.ray_address={address}: what answers there is not Ray's GCS (6379 by default)")


def _found_by_ray() -> str:
    """Return the address that `auto` stands for: of a Ray on this machine, or of the last one, which may have ended.

    Raises:
        ConfigError: there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise ConfigError(
            "parallel.ray_address=auto: no Ray runs on this machine; start one, or leave it out"
        ) from None


def _speaks_grpc(host: str, port: int) -> bool:
    """Return whether a port answers the first bytes of HTTP/2 with a frame of settings, as Ray's gRPC server does.

    Raises:
        OSError: nobody listens there.
    """
    with socket.create_connection((host, port), timeout=_ANSWER_S) as sock:
        try:
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0")
            head = b""
            while len(head) < 4 and (more := sock.recv(4 - len(head))):
                head += more
        except OSError:
            return False
        return head[3:] == b"\x04"
