"""Parses the names of engine steps in traces."""

from __future__ import annotations

import re

from .rank_trace import Engine, Step

# vLLM, `annotate_profile` of its GPU worker: sq are query tokens, sk KV tokens including the step's own.
_VLLM = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
_VLLM_DETAILED = re.compile(r"execute_\d+_context_(\d+)\(sq(\d+)sk(\d+)\w*\)_generation_(\d+)\(sq(\d+)sk(\d+)\w*\)")
# SGLang, `_build_step_span_name` of its model runner.
_SGLANG = re.compile(r"step\[\s*(\w+)(?: bs=(\d+))?(?: toks=(\d+))?(?: ext=(\d+) dec=(\d+))?[^\]]*\]")
# Step names without token counts.
_PLAIN: dict[str, Engine] = {
    "scheduler.run_batch": "SGLang",
    "run_batch": "SGLang",
    "forward_step": "Megatron-LM",
    "forward-step": "Megatron-LM",
}


def step_of(name: str, start: float, end: float) -> tuple[Step, Engine] | None:
    """Return the step that an annotation names, and the engine with that naming scheme; None if it is not a step."""
    if found := _VLLM_DETAILED.match(name):
        prompts, tokens, keys, decodes, rows, context = map(int, found.groups())
        known = context if rows == decodes else None  # draft tokens attend only to parts of it
        return Step(start, end, name, prompts, tokens, keys - tokens, decodes, rows, known), "vLLM"
    if found := _VLLM.match(name):
        prompts, tokens, decodes, rows = map(int, found.groups())
        return Step(start, end, name, prompts, tokens, None, decodes, rows), "vLLM"
    if found := _SGLANG.match(name):
        return _sglang(found, Step(start, end, name)), "SGLang"
    if name in _PLAIN:
        return Step(start, end, name), _PLAIN[name]
    return None


def _sglang(found: re.Match[str], step: Step) -> Step:
    mode, batch, tokens, extended, decodes = found.groups()
    count = int(batch or 0)

    def known(prompts: int, prompt_tokens: int, rows: int) -> Step:
        return Step(step.start, step.end, step.label, prompts, prompt_tokens, None, rows, rows)

    if mode.upper() == "IDLE":
        return known(0, 0, 0)
    if mode.upper() == "DECODE" and count:
        return known(0, 0, count)
    if mode.upper() in ("EXTEND", "PREFILL") and tokens:
        return known(count, int(tokens), 0)
    if extended and decodes:
        return known(max(1, count - int(decodes)), int(extended), int(decodes))
    return step
