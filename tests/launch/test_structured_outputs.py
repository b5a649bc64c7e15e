"""Structured outputs over several ranks are those of one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.launch.ray_launcher import RayLauncher

PROMPTS = ["import os\n", "class Point:\n    def __init__(self, x):\n", "# a file of JSON:\n", "def main():\n"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
PARAMS = [
    SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA, disable_any_whitespace=True), max_tokens=40),
    SamplingParams(structured_outputs=StructuredOutputs(regex=r"\d{3}(-[a-f]{2}){4}"), temperature=1.0, seed=1),
    SamplingParams(structured_outputs=StructuredOutputs(choice=("red", "green\n")), temperature=1.0, seed=2),
    SamplingParams(max_tokens=20),
]
OVERRIDES: dict[str, Any] = {"scheduler.chunk": 6, "scheduler.tile": 1, "scheduler.batch": 4, "parallel.threads": 1}


@pytest.mark.slow
def test_ranks_do_not_change_them(ray_launcher: RayLauncher) -> None:
    with LLM("shipped", **OVERRIDES) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
    with LLM("shipped", pp=2, tp=2, launcher=ray_launcher, **OVERRIDES) as llm:
        found = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
    assert found == expected
    assert "name" in json.loads(found[0][0].text)
    assert [each[0].finish_reason for each in found] == ["stop", "stop", "stop", "length"]
