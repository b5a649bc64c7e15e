"""Separates the content-dependent time of micro-batches from random variation of the stages.

All stages compute the same micro-batches, so variation that they share is due to content.
"""

from __future__ import annotations

import numpy as np

from ...core.micro_batch_columns import Floats, Ints, values_at
from ..ledger.ledger import Ledger


def held_by(ledger: Ledger, of_run: Ints) -> Floats:
    """Return the features of micro-batches in which their times are about linear, [N, features]."""
    held = ledger.micro_batches
    columns = (held.tokens, held.prefill, held.decodes, held.context, held.chunk_prefix)
    return np.column_stack([np.ones(len(of_run)), *(values_at(column, of_run) for column in columns)])


def content_of(seconds: Floats, held: Floats) -> Floats:
    """Return the content-dependent time of micro-batches, [N], given times that differ only randomly by stage.

    It is a linear fit to `held`, plus the part of the residual that the stages share, as estimated from their
    covariance. A micro-batch's time is taken as the lower median over the stages, since noise only adds time.
    """
    num_stages = len(seconds)
    seconds = np.maximum(seconds, 1e-9)
    low = np.sort(seconds, axis=0)[(num_stages - 1) // 2]
    scaled = held / np.maximum(held.max(axis=0), 1.0) / low[:, None]
    factors, *_ = np.linalg.lstsq(scaled, np.ones(len(low)), rcond=None)
    fit = np.clip(scaled @ factors, 0.25, 4.0) * low
    rest = np.clip(np.log(seconds / fit), -1.0, 1.0)
    rest -= rest.mean(axis=1, keepdims=True)
    own = float(rest.var(axis=1).mean())
    shared = (float(rest.sum(axis=0).var()) - num_stages * own) / (num_stages * (num_stages - 1))
    shared = min(own, max(0.0, shared))
    weight = shared / (shared + (own - shared) / num_stages) if own > 0 else 1.0
    common = np.log(low / fit)
    content: Floats = fit * np.exp(weight * (common - common.mean()) + common.mean())
    return content
