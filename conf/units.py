"""Units of numeric keys (name suffixes), renamed keys, and values that are implausible for their unit."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

UNITS = {  # by name suffix
    "gigabytes_per_s": "GB/s (gigabytes, not gigabits)",
    "tflops": "TFLOP/s",
    "gib": "GiB",
    "mib": "MiB",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
_END = re.compile(rf"(?:^|[._])({'|'.join(UNITS)})$")
_FORMER = re.compile(r"(^|[._])gbps$")
_FORMER_OF_POLICY = {  # keys that one policy had under another name
    ("token_budget", "budget"): "max_batched_tokens",
    ("prefill_first", "max_batched_tokens"): "max_prefill_tokens",
}
_GONE = {"balance_decodes": False, "max_prefill_share": 1.0, "profile": None}  # of policies, with their defaults
_OF_OTHERS = {  # vLLM's and load testers' names for our keys
    **{"tensor_parallel_size": "parallel.tp", "pipeline_parallel_size": "parallel.pp"},
    **{"gpu_memory_utilization": "hardware.memory_gib", "enforce_eager": "model.cuda_graphs"},
    **{"max_num_seqs": "scheduler.batch", "max_num_batched_tokens": "scheduler.chunk"},
    **dict.fromkeys(("workload.num_requests", "workload.request_count"), "workload.num_prompts"),
}
_DAY_S = 86_400.0
_PLAUSIBLE: tuple[tuple[re.Pattern[str], float, float, str], ...] = (  # keys, plausible minimum and maximum, unit
    (
        re.compile(r"cluster\.(network|spine)\.gigabytes_per_s"),
        *(0.01, 100.0, "gigabytes per second; for a rate in Gbit/s divide by 8: 400 Gbit/s is 50"),
    ),
    (re.compile(r"cluster\.(node|all_reduce)\.gigabytes_per_s"), 0.1, 2000.0, "gigabytes per second"),
    (re.compile(r"hardware\.memory_gib"), 0.01, 1024.0, "GiB of one rank; 80 is an H100"),
    (re.compile(r"slo\..*_ms"), 1.0, 1e3 * 3600, "milliseconds; 1000 is a second"),
    (re.compile(r"(parallel|serve)\..*_s"), 0.0, 7 * _DAY_S, "seconds; 3600 is an hour"),
)


def unit_of(key: str) -> str | None:
    """Return the unit in words that a key's suffix stands for; None without such a suffix."""
    found = _END.search(key)
    return UNITS[found[1]] if found else None


def present_name(key: str) -> str:
    """Return the current name of a key: `gbps` was renamed to `gigabytes_per_s`, in the same unit."""
    return _FORMER.sub(r"\1gigabytes_per_s", key)


def renamed_of_policy(names: Iterable[str], key: str) -> str | None:
    """Return `renamed to 'scheduler.b'` for a former key of one of these policies; None for another key."""
    now = (_FORMER_OF_POLICY.get((name, key)) for name in names)
    return next((f"renamed to 'scheduler.{name}'" for name in now if name is not None), None)


def renamed(key: str, keys: Container[str]) -> str:
    """Return `; renamed to 'b'` for a former name of one of `keys`, a hint for another program's name, or ""."""
    if (ours := _OF_OTHERS.get(key.replace("-", "_"))) in keys:
        return f"; did you mean '{ours}'?"
    for (policy, former), now in _FORMER_OF_POLICY.items():
        if key == f"scheduler.{former}" and f"scheduler.{now}" in keys:
            return f"; renamed to 'scheduler.{now}' ({policy})"
    now = present_name(key)
    return f"; renamed to '{now}', in the same unit" if now != key and now in keys else ""


def with_present_names(value: Any) -> Any:
    """Return a recorded config with current key names, recursively, without former keys that set nothing."""
    if isinstance(value, dict):
        policy = str(value.get("name"))
        return {
            _FORMER_OF_POLICY.get((policy, key), present_name(key)): with_present_names(below)
            for key, below in value.items()
            if not ("max_batch" in value and key in _GONE and below == _GONE[key])
        }
    return [with_present_names(each) for each in value] if isinstance(value, list) else value


def doubtful(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Return one line per value that is implausible for its unit, from (dotted key, value) pairs."""
    return [
        f"{key}={value:g}: is in {unit}. Is this value intended?"
        for key, value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        for keys, least, most, unit in _PLAUSIBLE
        if keys.fullmatch(key) and not least <= value <= most
    ]
