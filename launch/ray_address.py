"""Checks the address of a Ray cluster before joining it."""

from __future__ import annotations

import os
import socket

from ..conf.errors import ConfigError, reason

_ANSWER_S = 3.0  # connection timeout


def check_address(address: str) -> None:
    """Check that Ray responds at an address; Ray itself takes minutes to notice if not.

    Raises:
        ConfigError: nothing responds, or another server.
    """
    found = _found_by_ray() if address == "auto" else address
    host, _, port = found.rpartition("://")[2].rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    hint = "" if found == address else "; start Ray there, or remove the key"
    address += f" ({found})" if hint else ""
    try:
        speaks_grpc = _speaks_grpc(host, int(port))
    except OSError as error:
        raise ConfigError(f"parallel.ray_address={address}: nothing responds there ({reason(error)}){hint}") from error
    if not speaks_grpc and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ConfigError(f"parallel.ray_address={address}: the server there is not Ray's GCS (6379 by default)")


def _found_by_ray() -> str:
    """Return the address for `auto`: the running Ray's on this machine or, if it has ended, the last one's.

    Raises:
        ConfigError: none.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise ConfigError(
            "parallel.ray_address=auto: no Ray runs on this machine; start one, or remove the key"
        ) from None


def _speaks_grpc(host: str, port: int) -> bool:
    """Return whether a port answers the HTTP/2 preface with a SETTINGS frame, like Ray's gRPC server.

    Raises:
        OSError: nothing listens there.
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
