"""Keys are named by their units, and values that look like another unit are asked about."""

from __future__ import annotations

import re
import typing
from typing import Any

import pytest

from gapless.conf.build import dotted_keys, group_names, leaves, load_group, to_mapping
from gapless.conf.clusters import ClusterConfig
from gapless.conf.costs import LinkConfig
from gapless.conf.meanings import meanings
from gapless.conf.schema import SimulateConfig
from gapless.conf.units import doubtful, present_name, unit_of, with_present_names
from gapless.launch.cli import main
from gapless.launch.commands import COMMANDS
from gapless.launch.compose import compose_one

# Words by which a meaning says what a number without a unit counts or is a share, factor or id of.
_COUNTED = re.compile(
    r"token|layer|head|rank|request|micro-batch|prompt|output|element|block|group|expert|stage|device|node|adapter|"
    r"pipeline|replica|process|fault|connection|thread|turn|user|client|run|replay|seed|setting|measurement|depth|"
    r"width|length|rows|size|port|second|ids?\b|number|priorit|frequenc|multiprocessor|"
    r"share|factor|rate of all adapters|relative|times as|how many times|longer|probability|exponent|coefficient|"
    r"shape|greedy|penal|favours|base of|bound of|variance|logits|1 where|combine:|as in gemm|as chunk|unevenly|clocks|"
    r"that are tried|micro-batches|multiplied|multiple of|softcap|cap \*"
)
_NAMED_RATES = re.compile(r"gbps|gb_s|mbps|_rate_s|_sec|_seconds|_bytes_s")


def _numeric(hint: Any) -> bool:
    return hint in (int, float) or any(map(_numeric, typing.get_args(hint)))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_number_has_a_unit_or_says_what_it_counts(command: str) -> None:
    cls = COMMANDS[command].config
    meaning = meanings(cls)
    numeric = [key for key, hint in dotted_keys(cls) if _numeric(hint)]
    assert [key for key in numeric if unit_of(key) is None and not _COUNTED.search(meaning[key])] == []
    assert [key for key in numeric if _NAMED_RATES.search(key)] == []


def test_help_prints_the_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help", "cluster.network.gigabytes_per_s"]) == 0
    assert "GB/s (gigabytes, not gigabits)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("rate", ["cluster.network.gbps", "hardware.costs.gemm.memory_gbps", "cluster.spine.gbps"])
def test_a_former_name_is_answered_with_the_present_one(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"{rate}=2.5"]) == 2
    assert f"'{present_name(rate)}'" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["num_requests", "request_count"])
def test_a_load_tester_s_name_of_the_count_is_answered_with_ours(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", f"workload.{count}=3"]) == 2
    assert capsys.readouterr().err.endswith(f"workload.{count}: unknown key; did you mean 'workload.num_prompts'?\n")


def test_a_recorded_config_with_former_names_is_read() -> None:
    config = compose_one(["cluster=pcie", "hardware=a100-80g"], SimulateConfig, "simulate")

    def former(value: Any) -> Any:
        if isinstance(value, dict):
            return {key.replace("gigabytes_per_s", "gbps"): former(each) for key, each in value.items()}
        return value

    mapping = to_mapping(config)
    assert former(mapping) != mapping
    assert with_present_names(former(mapping)) == mapping


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("cluster.network.gigabytes_per_s", rate) for rate in (200.0, 400.0)),
        ("cluster.spine.gigabytes_per_s", 1e-3),
        ("hardware.memory_gib", 81_920.0),
        ("slo.ttft_p99_ms", 0.5),
        ("serve.timeout_s", 6e6),
    ],
)
def test_a_value_that_looks_like_another_unit_is_asked_about(key: str, value: float) -> None:
    (line,) = doubtful([(key, value)])
    assert line.startswith(f"{key}={value:g}: ")


@pytest.mark.parametrize("group", ["cluster", "hardware"])
def test_nothing_that_is_shipped_is_asked_about(group: str) -> None:
    for name in group_names(group):
        assert doubtful(leaves({group: load_group(group, name)})) == []


def test_a_link_is_in_gigabytes() -> None:
    link = LinkConfig(least_us=0.0, ramp_us=0.0, gigabytes_per_s=250.0, knee=1.0)
    values = leaves({"cluster": to_mapping(ClusterConfig(network=link))})
    assert doubtful(values) == [
        "cluster.network.gigabytes_per_s=250: is in gigabytes per second; for a rate in Gbit/s divide by 8: "
        "400 Gbit/s is 50. Is this value intended?"
    ]


def test_a_policy_s_former_keys_are_answered_with_the_present_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for given, now in (
        ("scheduler=token_budget scheduler.budget=8", "scheduler.max_batched_tokens"),
        ("scheduler=prefill_first scheduler.max_batched_tokens=8", "scheduler.max_prefill_tokens"),
    ):
        assert main(["simulate", *given.split()]) == 2
        assert f"renamed to '{now}'" in capsys.readouterr().err
    recorded = {"policies": [{"name": "token_budget", "budget": 8}, {"name": "prefill_first", "max_batched_tokens": 9}]}
    present = [{"name": "token_budget", "max_batched_tokens": 8}, {"name": "prefill_first", "max_prefill_tokens": 9}]
    assert with_present_names(recorded) == {"policies": present}


def test_a_recorded_key_that_has_gone_is_dropped_unless_it_was_set() -> None:
    kept = {"name": "equal_time", "max_batch": 8}
    recorded = kept | {"max_prefill_share": 1.0, "profile": None}
    assert with_present_names(recorded) == kept
    assert with_present_names(recorded | {"max_prefill_share": 0.5}) == kept | {"max_prefill_share": 0.5}
