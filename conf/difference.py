"""The config of `gapless diff`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffConfig:
    """`gapless diff BASE RUN`: what changed between two runs, and its effect."""

    runs: tuple[str, ...] = ()
    """two run folders, BASE and RUN, or two folders of repeated runs; the positional arguments"""
    out: str | None = None
    """output folder for report.html and comparison.json; null: a new one next to RUN"""
