"""Rows of prompts: values as requests have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import GenerateConfig, ModelConfig
from gapless.launch.prompts import Prompt, StandardInput, read_prompts


def prompt_of(row: Any, folder: Path) -> Prompt:
    """Return the prompt of a file with one row."""
    (folder / "rows.jsonl").write_text(json.dumps(row))
    config = GenerateConfig(model=ModelConfig(weights="shipped"), prompts=str(folder / "rows.jsonl"))
    (found,) = read_prompts(config, StandardInput())
    return found


PLAIN: dict[str, tuple[Any, Any]] = {  # values of a row, and what they stand for
    **{name: (None, getattr(SamplingParams(), name)) for name in ("temperature", "max_tokens", "stop", "n", "top_p")},
    **{f"{name} ": (4.0, 4) for name in ("max_tokens", "top_k", "seed", "min_tokens")},
    **{f"{name}  ": (-1, None if name == "seed" else 0) for name in ("seed", "top_k")},
    **{"stop_token_ids": ([3.0], (3,)), "stop ": ("x", ("x",)), "n ": (2.0, 2), "logit_bias": ({"5": 1}, {5: 1})},
}


@pytest.mark.parametrize("name", PLAIN)
def test_values_of_rows_are_read_as_those_of_requests(name: str, tmp_path: Path) -> None:
    given, read = PLAIN[name]
    name = name.strip()
    found = prompt_of({"prompt": "x", name: given}, tmp_path)
    defaults = {each: getattr(SamplingParams(), each) for each in ("temperature", "max_tokens")}
    assert {each: getattr(found.params, each) for each in (*defaults, name)} == {**defaults, name: read}
