"""Units of numeric keys: each is the end of a key's name. Also former names of keys, and values that look mistaken."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

UNITS = {  # by the end of a key's name
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
_OF_OTHERS = {  # names of vLLM and of load testers that are unlike ours
    **{"tensor_parallel_size": "parallel.tp", "pipeline_parallel_size": "parallel.pp"},
    **{"gpu_memory_utilization": "hardware.memory_gib", "enforce_eager": "model.cuda_graphs"},
    **{"max_num_seqs": "scheduler.batch", "max_num_batched_tokens": "scheduler.chunk"},
    **dict.fromkeys(("workload.num_requests", "workload.request_count"), "workload.num_prompts"),
}
_DAY_S = 86_400.0
_PLAUSIBLE: tuple[tuple[re.Pattern[str], float, float, str], ...] = (  # keys, least and most, what to ask outside
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
    """Return the unit that a key's name ends in, in words; None if it ends in none."""
    found = _END.search(key)
    return UNITS[found[1]] if found else None


def present_name(key: str) -> str:
    """Return the name that a key has now: keys in `gbps` became `gigabytes_per_s`, the unit that they always had."""
    return _FORMER.sub(r"\1gigabytes_per_s", key)


def renamed(key: str, keys: Container[str]) -> str:
    """Write `; it is called 'b' now` for a former name of one of `keys`, a hint for another program's, or nothing."""
    if (ours := _OF_OTHERS.get(key.replace("-", "_"))) in keys:
        return f"; did you mean '{ours}'?"
    now = present_name(key)
    return f"; it is called '{now}' now, in the same unit" if now != key and now in keys else ""


def with_present_names(value: Any) -> Any:
    """Return a recorded config with the present names of its keys, all the way down."""
    if isinstance(value, dict):
        return {present_name(key): with_present_names(below) for key, below in value.items()}
    return [with_present_names(each) for each in value] if isinstance(value, list) else value


def doubtful(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Return one line for each value, of dotted keys with their values, that its unit makes implausible."""
    return [
        f"{key}={value:g}: is in {unit}. Is this value intended?"
        for key, value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        for keys, least, most, unit in _PLAUSIBLE
        if keys.fullmatch(key) and not least <= value <= most
    ]
