"""The costs by which a run's compute time is judged: those of its cost model, or what its own spans show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...conf.errors import ConfigError
from ...parallel.placement import nodes_of_a_stage
from ..core.run_record import RunRecord
from ..engine.plan import Plan
from ..run_folder.titles import is_simulated
from ..simulation.setting import Setting, make_setting
from .compute_losses import KnownCosts
from .learned_run import learn_run
from .twin import config_of

_MOST_FITTED = 2000  # micro-batches


def known_costs(
    record: RunRecord, recorded: Mapping[str, Any], *, setting: Setting | None = None, plan: Plan | None = None
) -> KnownCosts | None:
    """Return the costs of a run's stages; None where neither its config nor its spans give any.

    Args:
        record: of the run.
        recorded: its config, as `summary.json` has it.
        setting: of a simulated run; None: it is made of the config.
        plan: of a real run; None: it is made of the config.
    """
    if record.unknown or not record.micro_batches or not any(request.token_times for request in record.requests):
        return None
    try:
        config = config_of(recorded)
        if is_simulated(recorded):
            return known_of(setting or make_setting(config))
        return known_of(learn_run(config, _thinned(record), plan).setting(config), is_learned=True)
    except ConfigError:
        return None


def _thinned(record: RunRecord) -> RunRecord:
    """Return a long run with some of its micro-batches alone, evenly over it: enough to fit stage times."""
    step = -(-len(record.micro_batches) // _MOST_FITTED)
    if step <= 1:
        return record
    kept = record.micro_batches[::step]
    numbers = {each.micro_batch for each in kept}
    spans = [span for span in record.spans if span.micro_batch in numbers]
    return replace(record, micro_batches=kept, spans=spans)


def known_of(setting: Setting, *, is_learned: bool = False) -> KnownCosts:
    """Return the costs of a setting."""
    config = setting.config
    nodes = 1 if is_learned else nodes_of_a_stage(config.parallel.tp, config.cluster.devices_per_node)
    return KnownCosts(setting.costs, config.hardware.tile, nodes, is_learned)
