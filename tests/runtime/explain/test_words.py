"""A run in words: its first sentence names the cause that was planted in a simulated run, under several policies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from gapless.conf.build import to_mapping
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.drawing.page_parts import words_section
from gapless.runtime.explain.explanation import Interval, Outcome
from gapless.runtime.explain.finding import Finding, Findings
from gapless.runtime.explain.roots import Root
from gapless.runtime.explain.run_words import RunWords
from gapless.runtime.explain.words import sentences
from gapless.runtime.ledger.causes import CAUSES, Cause
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting
from tests.support.written_runs import analysed

POLICIES = ("sarathi", "equal_time", "token_budget", "orca_best")
SMALL = ("model=llama-13b", "hardware=a100-80g", "parallel=pp2", "workload=zipf", "workload.num_prompts=40")
SLOW_LINK = ("cluster=ethernet-25g", "cluster.devices_per_node=1", "cluster.network.gigabytes_per_s=0.05")
LM_HEAD = ("model=llama3-8b", "parallel.pp=8", "parallel.layers=[4,4,4,4,4,4,4,4]", "workload.num_prompts=60")
EVEN = "parallel.layers=[20,20]"


@cache
def fleet_of(*overrides: str) -> tuple[Fleet, SimulateConfig]:
    config = compose_one([*SMALL, *overrides], SimulateConfig, "simulate")
    setting = make_setting(config)
    workload, _ = requests(config, {config.scheduler: setting.plan})
    replicas = simulated(setting, workload)
    num_prefill = config.simulation.disaggregation.prefill_replicas or 0
    return Fleet([replica.record for replica in replicas], num_prefill=num_prefill), config


def words_of(*overrides: str) -> list[str]:
    fleet, config = fleet_of(*overrides)
    return analysed(fleet, to_mapping(config)).words


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("planted", "first"),
    [
        ((EVEN, "simulation.devices=[a100-80g,a6000]"), "Stage 1 takes 2."),
        ((EVEN, "simulation.devices=[a6000,a100-80g]"), "Stage 0 takes 2."),
        (LM_HEAD, "Stage 7 takes 1.4 times as long as the others for micro-batches of decodes, but not for those with"),
        (("parallel.layers=[26,14]",), "Stage 0 holds 26 of 40 layers and takes 1.8 times as long as the other"),
        (("parallel.pp=4", "parallel.layers=[7,7,19,7]"), "Stage 2 holds 19 of 40 layers and takes 2.6 times"),
        (("workload.request_rate=0.3",), "Too few requests: "),
        (("workload.max_concurrency=1",), "Too few requests: all requests were in flight for"),
        (("simulation.dispatch_ms=30",), "The coordinator dispatched late for"),
        (("cache.num_blocks=260",), "The KV cache had no room for waiting requests"),
        (SLOW_LINK, "Activations were under way"),
        (("parallel.depth=1",), "Only 1 micro-batch is in flight, fewer than there are stages"),
        (("simulation.faults.at=[2,4]",), "The pipeline had failed for"),
    ],
    ids=lambda each: each[0].split("=")[0] if isinstance(each, tuple) else "",
)
def test_the_first_sentence_names_what_was_planted(planted: tuple[str, ...], first: str, policy: str) -> None:
    words = words_of(f"scheduler={policy}", *planted)
    assert words[0].startswith(first), words
    assert 2 <= len(words) <= 3


@pytest.mark.parametrize("policy", ["equal_time", "token_throttle"])
def test_a_healthy_run_says_so(policy: str) -> None:
    (only,) = words_of(f"scheduler={policy}")
    assert re.match(
        r"Nothing large slowed this run: of 18\.\d+ s, the work itself takes 16\.\d+ s, 9\d\.\d% of it", only
    )
    assert "by the cost model; the largest cause, memory bandwidth at small batches, takes " in only


def test_uneven_micro_batches_are_told_from_stages_that_vary() -> None:
    uneven = words_of("scheduler=orca_best")
    assert uneven[0].startswith(
        "PB1 takes 5.9% of stage time (1.16 s of the run), and with PB3 9.4%: under orca_best "
    ), uneven
    varying = words_of("scheduler=equal_time", "simulation.jitter=0.2")
    assert varying[0].startswith("Stage times that vary by chance take 7"), varying
    assert (
        "16 at a time: the policy prefill_first put them into fewer micro-batches"
        in words_of("scheduler=prefill_first")[0]
    )
    batches = words_of("scheduler=request_level", "cache.num_blocks=400")
    assert re.search(
        r"only 2 requests run while \d+ wait: the policy request_level took no more of them\.$", batches[0]
    )


def test_replicas() -> None:
    idle = words_of("simulation.replicas=2", "workload.request_rate=0.3")
    assert idle[0].startswith("Too few requests: no request was there for"), idle
    slow = words_of("simulation.replicas=2", EVEN, "simulation.devices=[a100-80g,a6000]", "workload.num_prompts=80")
    assert slow[0].startswith(("Replica 0: stage 1 takes 2.", "Replica 1: stage 1 takes 2.")), slow
    pools = words_of("simulation.disaggregation.prefill_replicas=1")
    assert pools[0].startswith("Prefill 0: no work was there for "), pools


def advised(fleet: Fleet, config: SimulateConfig, advice: Sequence[Outcome], metric: str = "duration") -> list[str]:
    found = analysed(fleet, to_mapping(config)).findings
    return sentences(found, advice, metric, RunWords({"scheduler": {"name": config.scheduler.name}}))


SAVES = {"duration": Interval(0.072, 0.061, 0.080)}
ADVICE = Outcome("scheduler=equal_time", ("scheduler=equal_time",), None, SAVES)


def test_advice_is_named_with_its_interval() -> None:
    fleet, config = fleet_of("scheduler=sarathi")
    unsure = Outcome("parallel.depth=3", (), None, {"duration": Interval(0.08, -0.01, 0.2)})
    tail = Outcome("scheduler.chunk=128", (), None, {"p99_itl_ms": Interval(0.3, 0.2, 0.4)})

    def second(*advice: Outcome, metric: str = "duration") -> str:
        return advised(fleet, config, advice, metric)[1]

    assert second(unsure, ADVICE) == "scheduler=equal_time would save 7.2% of the run (6.1 to 8.0)."
    assert second(tail, metric="p99_itl_ms") == "scheduler.chunk=128 would save 30.0% of the p99 TBT (20.0 to 40.0)."
    trade = replace(
        ADVICE, saves={"duration": Interval(0.4, 0.3, 0.5)}, note="p99 TBT takes 4 times as long", is_trade=True
    )
    assert second(trade).endswith(" of the run (30.0 to 50.0), but p99 TBT takes 4 times as long.")
    assert second(ADVICE, trade).endswith("7.2% of the run (6.1 to 8.0).")
    nothing = "No change that was replayed is sure to save anything"
    assert second() == f"{nothing}."
    assert second(unsure) == f"{nothing}; parallel.depth=3 may save 8.0% of the run (-1.0 to 20.0)."


def test_a_change_of_the_root_is_named_before_the_one_that_saves_most() -> None:
    split = Outcome("layers=[16,16]", ("parallel.layers=[16,16]",), None, {"duration": Interval(0.05, 0.04, 0.06)})
    fleet, config = fleet_of("scheduler=sarathi", "parallel.layers=[28,12]")
    lines = advised(fleet, config, [ADVICE, split])
    assert lines[0].startswith("Stage 0 holds 28 of 40 layers"), lines
    assert lines[1:3] == [
        "layers=[16,16] would save 5.0% of the run (4.0 to 6.0).",
        "scheduler=equal_time would save most, 7.2% of the run (6.1 to 8.0).",
    ]


@pytest.mark.parametrize("root", Root)
def test_each_root_has_its_words(root: Root) -> None:
    by_cause = dict.fromkeys(CAUSES, 1.0)
    evidence = defaultdict(lambda: 1.0, {"layers": 8.0, "of_layers": 12.0})
    found = Finding(root, Cause.PB2_PREFILL_DECODE, 4.0, 0.44, 1, evidence, by_cause, there=4.0)
    words = sentences(Findings((found,), 0.6, 2))
    assert len(words) == 2
    assert all(word.endswith(".") for word in words)
    assert any(share in words[0] for share in ("44.0%", "22.0%", "4.0%")), words


def test_the_first_sentence_of_a_page_stands_out() -> None:
    assert words_section(["a < b.", "c.", "d."]) == (
        '<section class="verdict"><p><b>a &lt; b.</b></p><p>c. d.</p></section>\n'
    )
    assert words_section([]) == ""
