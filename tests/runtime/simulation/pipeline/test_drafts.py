"""Draft tokens in a simulation: whether they pay is found out as the run goes."""

from __future__ import annotations

import pytest

from gapless.conf.policies import POLICY_CONFIGS
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.run_record import MicroBatchRecord
from gapless.runtime.engine.plan import Plan
from gapless.runtime.scheduler import Limits
from gapless.runtime.simulation.cost.operators import HostTimes
from gapless.runtime.simulation.cost.stage_costs import StageCosts
from gapless.runtime.simulation.pipeline.replicas import Replica
from gapless.runtime.simulation.pipeline.simulated_pipeline import SimulatedPipeline
from tests.support.simulated_parts import ARCHITECTURE, BLOCK, Device, items, run

WORK = items(*[(20, 90)] * 12)
TILE = 16


class CheapRows(Device):
    """Reads its weights for as long as 100 rows take."""

    def linear(self, operator: str, rows: int) -> float:
        return 0.0001 * (1.0 + 0.01 * rows)


class DearRows(Device):
    """Takes as long for each row."""

    host = HostTimes()

    def linear(self, operator: str, rows: int) -> float:
        return 0.0001 * rows


def simulate(policy: str, device: Device, acceptance: float, drafts: int = 6, seed: int = 0) -> Replica:
    config = POLICY_CONFIGS[policy](drafts=drafts)
    depth = config.depth(2)
    costs = StageCosts((2, 2), [device] * 2)
    limits = Limits(4, depth, TILE, num_stages=2)
    plan = Plan(ARCHITECTURE, (2, 2), 400, BLOCK, False, limits, None)
    pipeline = SimulatedPipeline(costs, depth=depth.most, num_blocks=400, draft_acceptance=acceptance, seed=seed)
    replica = Replica(pipeline, config, plan)
    assert run(replica, WORK) == len(WORK)
    return replica


def drafts_of(micro_batches: list[MicroBatchRecord]) -> tuple[int, int, int]:
    """Count decodes, draft tokens, and those that were accepted."""
    drafts = sum(m.drafts for m in micro_batches)
    return sum(m.decode_tokens for m in micro_batches) - drafts, drafts, sum(m.accepted for m in micro_batches)


@pytest.mark.parametrize("policy", list(POLICY_CONFIGS))
def test_accepted_drafts_make_a_run_shorter(policy: str) -> None:
    with_drafts, without = (simulate(policy, CheapRows(), 0.9, drafts) for drafts in (6, 0))
    decodes, drafts, accepted = drafts_of(with_drafts.record.micro_batches)
    assert accepted > decodes, "more than one a decode"
    assert accepted < drafts
    assert without.record.micro_batches[-1].completed is not None
    assert with_drafts.record.micro_batches[-1].completed < 0.8 * without.record.micro_batches[-1].completed
    summary = summarize(Fleet([with_drafts.record]))
    assert summary["accepted_tokens_per_decode"] == accepted / decodes
    assert summary["total_output_tokens"] == sum(item.output_len for item in WORK)


@pytest.mark.parametrize("policy", list(POLICY_CONFIGS))
@pytest.mark.parametrize(("device", "acceptance"), [(CheapRows(), 0.0), (DearRows(), 0.3)], ids=["wrong", "dear"])
def test_drafts_that_do_not_pay_stop(policy: str, device: Device, acceptance: float) -> None:
    with_drafts, without = (simulate(policy, device, acceptance, drafts) for drafts in (6, 0))
    micro_batches = with_drafts.record.micro_batches
    late = micro_batches[len(micro_batches) // 2 :]
    decodes, drafts, _ = drafts_of(late)
    assert drafts < 0.02 * decodes
    assert sum(m.drafts for m in micro_batches) > 0, "they were tried"
    assert with_drafts.record.micro_batches[-1].completed < 1.15 * without.record.micro_batches[-1].completed


def test_acceptance_is_drawn_by_seed_request_and_position() -> None:
    a, again, other = (simulate("sarathi", CheapRows(), 0.6, seed=seed) for seed in (1, 1, 2))
    times = [[r.token_times for r in replica.record.requests] for replica in (a, again, other)]
    assert times[0] == times[1] != times[2]
    _, _, accepted = drafts_of(a.record.micro_batches)
    rejected = sum(m.drafts > m.accepted for m in a.record.micro_batches)
    assert rejected > 0
    assert accepted > 0


def test_a_step_of_all_accepted_drafts_is_one_more_than_they_are() -> None:
    replica = simulate("orca_best", CheapRows(), 1.0)
    decodes, drafts, accepted = drafts_of(replica.record.micro_batches)
    assert accepted == drafts
    assert decodes + accepted == sum(item.output_len - 1 for item in WORK), "the first token is the prefill's"
