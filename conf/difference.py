"""The config of `gapless diff`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffConfig:
    """`gapless diff BASE RUN`: what differs between two runs, and what that did."""

    runs: tuple[str, ...] = ()
    """two run folders, BASE and RUN, or folders that hold repeats of one run each; the bare arguments"""
    out: str | None = None
    """folder for diff.html and diff.json; null: a new one beside RUN"""
