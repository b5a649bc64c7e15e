"""The eight policies, one file each, and the lookup of the policy that a config names.

A policy is the only `Scheduler` in its file. A built-in policy's file is in this folder, named like the policy;
a user's file is given by `scheduler=./FILE.py`.
"""

from __future__ import annotations

from importlib import import_module

from ....conf.errors import ConfigError
from ....conf.policies import POLICY_CONFIGS, SchedulerConfig
from ....conf.policy_file import load_policy_file
from ...core.block_pool import BlockPool
from ..base import Scheduler
from ..limits import Limits

POLICIES = tuple(POLICY_CONFIGS)  # built-in


def make_scheduler(config: SchedulerConfig, limits: Limits, pool: BlockPool) -> Scheduler:
    """Make the policy that a config names, with empty queues.

    Raises:
        ConfigError: see `find_policy`.
    """
    return find_policy(config)(config, limits, pool)


def find_policy(config: SchedulerConfig) -> type[Scheduler]:
    """Return the class of the policy that a config names.

    Raises:
        ConfigError: the user's file fails to run, or does not contain exactly one policy.
    """
    file = getattr(config, "file", None)
    module = load_policy_file(file) if file else import_module(f".{config.name}", __package__)
    defined = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Scheduler) and value.__module__ == module.__name__
    ]
    found = [cls for cls in defined if not any(cls in other.__mro__[1:] for other in defined)]
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ConfigError(f"{file}: must hold one class that extends Scheduler; it holds {names}")
    (policy,) = found
    missing = set(getattr(policy, "__abstractmethods__", ()))
    if policy.fill is Scheduler.fill:
        missing.add("fill")
    if missing:
        raise ConfigError(f"{file}: {policy.__name__} lacks {', '.join(sorted(missing))}")
    return policy
