"""The eight policies, a file each, and how the policy that a config names is found.

A policy is the one `Scheduler` of its file: of ours the file in this folder that its config calls `rule`, of the user's
the one that `scheduler=./FILE.py` names.
"""

from __future__ import annotations

from importlib import import_module

from ....conf.errors import ConfigError
from ....conf.policies import POLICY_CONFIGS, SchedulerConfig
from ....conf.policy_file import load_policy_file
from ...core.block_pool import BlockPool
from ..base import Limits, Scheduler

POLICIES = tuple(POLICY_CONFIGS)  # ours


def make_scheduler(config: SchedulerConfig, limits: Limits, pool: BlockPool) -> Scheduler:
    """Make the policy that a config names, with nothing in its queues.

    Raises:
        ConfigError: as `find_policy`.
    """
    return find_policy(config)(config, limits, pool)


def find_policy(config: SchedulerConfig) -> type[Scheduler]:
    """Return the class of the policy that a config names.

    Raises:
        ConfigError: the user's file does not run, or does not hold one policy.
    """
    file = getattr(config, "file", None)
    module = load_policy_file(file) if file else import_module(f".{config.rule}", __package__)
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
