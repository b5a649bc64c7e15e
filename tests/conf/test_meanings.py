"""Every field of the schema says what it means, and `--help` finds it there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gapless.conf.build import dotted_keys, leaf_fields
from gapless.conf.meanings import field_meaning, meanings
from gapless.conf.policies import SarathiConfig, SchedulerConfig
from gapless.conf.schema import BenchConfig, EngineConfig
from gapless.launch.commands import COMMANDS, Command


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_every_field_of_the_schema_has_a_meaning(command: Command) -> None:
    for key, _, owner in leaf_fields(command.config):
        _, meaning = field_meaning(owner, key.rpartition(".")[2])
        assert meaning, key
        assert "\n" not in meaning


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_the_meanings_are_those_of_the_keys(command: Command) -> None:
    assert list(meanings(command.config)) == [key for key, _ in dotted_keys(command.config)]


def test_a_key_of_some_policies_or_workloads_names_them() -> None:
    found = meanings(BenchConfig)
    assert found["workload.theta"] == "zipf: exponent of the Zipf law of P + D"
    assert found["scheduler.tile"].startswith("sarathi, equal_time: ")
    assert found["workload.path"].startswith("trace: ")
    assert "; sharegpt: " in found["workload.path"]
    assert not found["scheduler.batch"].startswith("sarathi")


def test_a_policy_s_own_meaning_and_that_of_its_base_are_found() -> None:
    assert field_meaning(SarathiConfig, "chunk")[0] is SarathiConfig
    assert field_meaning(SarathiConfig, "batch")[0] is SchedulerConfig


@dataclass(frozen=True)
class Undocumented(EngineConfig):
    extra: int = 0


def test_a_field_without_a_docstring_has_no_meaning() -> None:
    with pytest.raises(LookupError, match=r"Undocumented\.extra"):
        meanings(Undocumented)
