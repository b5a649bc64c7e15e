"""The sentences of a run or a fleet, with what its config says of it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.run_record import RunRecord
from ..ledger.advice import Advice
from ..ledger.finding import Findings, find_causes, join_findings
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from .words import sentences


def words_of_run(
    record: RunRecord, ledger: Ledger, config: Mapping[str, Any], advice: Sequence[Advice] | None = None
) -> list[str]:
    """Say of one pipeline what cost most, what that comes from, and what would change it.

    Args:
        config: as `summary.json` keeps it; keys that it lacks are not known.
        advice: changes that are worth making by replays, the best first; None where nothing was replayed.
    """
    findings = find_causes(record, ledger, stage_layers(config))
    return _words(findings, config, advice, is_ours=not record.unknown)


def words_of_fleet(fleet: Fleet, config: Mapping[str, Any], advice: Sequence[Advice] | None = None) -> list[str]:
    """The same of replicas side by side, all in all, and on which of them it is."""
    if len(fleet.records) == 1:
        return words_of_run(fleet.records[0], fleet.ledgers[0], config, advice)
    layers = stage_layers(config) if not fleet.num_prefill else None  # which pools may split otherwise
    parts = [
        (fleet.replica_name(number), find_causes(record, ledger, layers), ledger.span_seconds)
        for number, (record, ledger) in enumerate(zip(fleet.records, fleet.ledgers, strict=True))
    ]
    return _words(join_findings(parts, fleet.span_seconds), config, advice)


def words_section(words: Sequence[str]) -> str:
    """Render sentences as the first paragraph of a page; empty if there are none."""
    if not words:
        return ""
    first, *rest = [html.escape(sentence) for sentence in words]
    more = f"<p>{' '.join(rest)}</p>" if rest else ""
    return f'<section class="verdict"><p><b>{first}</b></p>{more}</section>\n'


def stage_layers(config: Mapping[str, Any]) -> list[int] | None:
    """Layers of each stage, where the config names them."""
    layers = _group(config, "parallel").get("layers")
    return None if layers is None else list(layers)


def _words(
    findings: Findings, config: Mapping[str, Any], advice: Sequence[Advice] | None, *, is_ours: bool = True
) -> list[str]:
    return sentences(
        findings, advice, policy=_group(config, "scheduler").get("name"), token_bytes=_token_bytes(config),
        is_ours=is_ours,
    )  # fmt: skip


def _token_bytes(config: Mapping[str, Any]) -> float | None:
    """Bytes of one token's activation, where the config has the model's sizes."""
    model = _group(config, "model")
    hidden, dtype = _group(model, "architecture").get("hidden_size"), model.get("dtype")
    if hidden is None or dtype is None:
        return None
    is_wide = dtype == "float32" or (dtype == "auto" and _group(config, "hardware").get("device") == "cpu")
    return float(hidden * (4 if is_wide else 2))


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
