"""The limit on open files (RLIMIT_NOFILE)."""

from __future__ import annotations

import resource

from ..conf.errors import ConfigError

_OWN = 128  # files of a rank or its parent, without client connections
_ROOM = 4096  # the soft limit to set, which ranks and launchers inherit


def allow_files(connections: int = 0) -> None:
    """Raise the soft limit of this process and its children as needed.

    Args:
        connections: maximum client connections, `serve.max_connections`; 0: no server.

    Raises:
        ConfigError: the hard limit is lower.
    """
    needed = _OWN + connections
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if hard < needed:
        key = f"serve.max_connections={connections}: " if connections else ""
        fewer = f", or use serve.max_connections={int(hard) - _OWN}" if connections and hard > _OWN else ""
        raise ConfigError(f"{key}{needed} open files are needed, and the limit is {hard} (ulimit -Hn); raise it{fewer}")
    wanted = max(needed, min(_ROOM, hard))
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
