"""The limit on files that a process may have open."""

from __future__ import annotations

import resource

from ..conf.errors import ConfigError

_OWN = 128  # files that a rank, or the process that starts ranks, has open beside connections of clients
_ROOM = 4096  # the soft limit that is asked for, as ranks and their launchers inherit it


def allow_files(connections: int = 0) -> None:
    """Let this process, and those that it starts, open as many files as they need.

    Args:
        connections: of clients, as `serve.max_connections` allows them; 0: there is no server.

    Raises:
        ConfigError: the hard limit of the system is lower.
    """
    needed = _OWN + connections
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if hard < needed:
        key = f"serve.max_connections={connections}: " if connections else ""
        fewer = f", or serve.max_connections={int(hard) - _OWN} at most" if connections and hard > _OWN else ""
        raise ConfigError(f"{key}a process may open {hard} files here (ulimit -Hn); must be {needed} at least{fewer}")
    wanted = max(needed, min(_ROOM, hard))
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
