"""Overrides of `gapless simulate` for each experiment, as the paper states them."""

from __future__ import annotations

from collections.abc import Mapping

# SARATHI's operators and iterations: LLaMA-13B on an A6000.
_OPERATORS = {
    "model": "llama-13b",
    "hardware": "a6000",
    "parallel": "local",
    "scheduler": "sarathi",
    "simulation.last_layer": "all",
    "simulation.host": "false",
}
# Whole runs on it. Of the 48 GB, weights and the paper's 10 requests of 2K take 39.9 GiB.
_REQUESTS = {**_OPERATORS, "workload": "fixed", "hardware.memory_gib": "42.0", "workload.num_prompts": "360"}
# GPT-3 over 8 x 8 A100s, with the parameters that the paper states (5.3). B is of one micro-batch, eight in flight:
# 64 GPUs hold 27 x 8 requests of 4K beside the weights.
_FIGURE_12 = {
    "model": "gpt3-175b",
    "hardware": "a100-80g",
    "hardware.attention": "flash_attention",
    "parallel": "tp8_pp8",
    "parallel.depth": "null",
    "scheduler": "sarathi",
    "scheduler.batch": "27",
    "scheduler.chunk": "256",
    "workload": "zipf",
    "workload.num_prompts": "10000",
    "workload.theta": "0.4",
    "workload.min_len": "1024",
    "workload.max_len": "4096",
    "workload.pd_ratio": "10.0",
    "simulation.last_layer": "all",
    "simulation.host": "false",
}

SETTINGS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("figure3", "figure4", "table2", "figure7", "figure8"), _OPERATORS),
    **dict.fromkeys(("table4", "figure9", "figure10", "figure11", "figure13"), _REQUESTS),
    "figure12": _FIGURE_12,
}
