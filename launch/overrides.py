"""Returns the command line that composes to a given config."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from ..conf.build import build, group_names, leaves, load_command, load_group, to_mapping, value_text
from ..conf.policy_file import policy_mapping
from ..conf.schema import NAMED_WEIGHTS, EngineConfig

_SHELL_SAFE = "=,.[]/-_:@%+"  # characters that need no quoting in a shell


def command_line(config: EngineConfig, command: str, *extra: str, named: Sequence[str] = ()) -> str:
    """Return `gapless COMMAND ...` in shell syntax. Overrides in `named` are included even if they are defaults."""
    own = overrides(config, command)
    grid = ("parallel.pp=", "parallel.tp=") if any(text.startswith("parallel=") for text in own) else ()
    more = (text for text in named if text not in own and not text.startswith(grid))
    words = ["gapless", command, *own, *more, *extra]
    return " ".join(w if all(c.isalnum() or c in _SHELL_SAFE for c in w) else shlex.quote(w) for w in words)


def overrides(config: EngineConfig, command: str) -> list[str]:
    """Return overrides that compose to `config`: the closest choice of each group, and the keys that differ."""
    mapping = to_mapping(config)
    mapping.pop("engine", None)  # its keys are listed individually
    composed, groups = load_command(command)
    found: list[str] = []
    for group, default in groups.items():
        part = mapping.get(group)
        if default is None or not isinstance(part, dict):
            continue
        choice, composed[group] = _choice(group, part, default)
        if choice != default:
            found.append(f"{group}={choice}")
        if group == "workload" and part.get("path"):  # required by the config to compare with
            composed[group] |= {"path": part["path"]}
            found.append(f"workload.path={part['path']}")
    before = dict(leaves(to_mapping(build(type(config), composed))))
    found += [f"{key}={value_text(value)}" for key, value in leaves(mapping) if before.get(key) != value]
    return found


def _choice(group: str, part: dict[str, Any], default: str) -> tuple[str, dict[str, Any]]:
    """Return the choice of a group that a part of a config came from, or a close one, and its contents."""
    names = group_names(group)
    if group == "model" and part["weights"] not in NAMED_WEIGHTS:
        where = {"weights": part["weights"], "name": part["name"]}
        return part["weights"], load_group("model", "folder") | where
    if group == "scheduler" and part.get("file"):
        return part["file"], policy_mapping(part["file"])
    if group == "parallel":
        choice = "_".join(f"{key}{part[key]}" for key in ("tp", "pp") if part[key] > 1) or "local"
    else:
        choice = part["name"] if part["name"] in names else default
    return choice, load_group(group, choice)
