"""The shipped prompts fit the shipped model, and some are long enough to be chunked."""

from __future__ import annotations

import json
from importlib.resources import files

from gapless.conf.sampling import SamplingParams
from gapless.models.tokenizer import load_tokenizer


def test_shipped_prompts_fit_the_shipped_model():
    model = files("gapless.models") / "shipped"
    arch = json.loads((model / "config.json").read_text())
    tokenizer = load_tokenizer(str(model), arch["vocab_size"])
    text = (files("gapless.conf") / "shipped_prompts.jsonl").read_text(encoding="utf-8")
    assert len(text.encode()) < 60_000
    lengths = []
    for line in text.splitlines():
        row = json.loads(line)
        params = SamplingParams(**{key: value for key, value in row.items() if key != "prompt"})
        lengths.append(len(tokenizer.encode(row["prompt"])))
        assert lengths[-1] + params.max_tokens < arch["max_position_embeddings"]
    assert len(lengths) >= 10
    assert sum(n > 1000 for n in lengths) >= 4
    assert sum(n < 300 for n in lengths) >= 5
