"""From a workload's config to its requests: lengths, cut to the context where a file has longer ones, and arrivals."""

from __future__ import annotations

import numpy as np

from ...conf.errors import ConfigError
from ...conf.workloads import FixedConfig, ShareGptConfig, TraceConfig, WorkloadConfig, ZipfConfig
from ...models.tokenizer import Tokenizer
from . import fixed, sharegpt, trace, zipf
from .arrivals import arrivals
from .workload import Drawn, Workload

DEFAULT_NUM_PROMPTS = 100  # where no file says how many there are


def make_workload(config: WorkloadConfig, *, vocab_size: int, context: int, tokenizer: Tokenizer) -> Workload:
    """The requests of `config` for a model: the same for the same config, wherever they are made.

    `context`: most tokens that a request may come to. Lengths that are drawn must fit into it; those of a file are
    cut to it, the prompt first, the output where it leaves no room for a prompt.

    Raises:
        ConfigError: lengths that do not fit, naming what would; a file that is missing, damaged or too short.
    """
    drawn = _draw(config, context, tokenizer)
    inputs = np.clip(context - drawn.outputs, 1, drawn.inputs)
    outputs = np.minimum(drawn.outputs, context - inputs)
    return Workload(
        input_lens=inputs,
        output_lens=outputs,
        arrivals=arrivals(config, len(inputs), drawn.times),
        vocab_size=vocab_size,
        seed=config.seed,
        users=config.users,
        deadline=None if config.deadline_ms is None else config.deadline_ms / 1e3,
        num_cut=int(np.count_nonzero(drawn.inputs + drawn.outputs > context)),
        prompts=drawn.prompts,
    )


def _draw(config: WorkloadConfig, context: int, tokenizer: Tokenizer) -> Drawn:
    num = config.num_prompts
    if isinstance(config, TraceConfig):
        return trace.draw(config, num)
    if isinstance(config, ShareGptConfig):
        return sharegpt.draw(config, num, tokenizer)
    room = f"and one may have {context} (model.max_model_len, or what the KV cache holds)"
    if isinstance(config, FixedConfig):
        if (most := fixed.longest(config)) > context:
            raise ConfigError(
                f"workload=fixed: requests come to {most} tokens, {room}; {fixed.fitting(config, context)}"
            )
        return fixed.draw(config, num or DEFAULT_NUM_PROMPTS)
    assert isinstance(config, ZipfConfig), config
    if config.max_len > context:
        fits = f"workload.max_len={context} fits" if config.min_len <= context else "lower min_len too"
        raise ConfigError(f"workload.max_len={config.max_len}: requests come to it, {room}; {fits}")
    return zipf.draw(config, num or DEFAULT_NUM_PROMPTS)
