"""Makes a workload from its config: draws lengths and arrivals, and cuts requests of a file to the context."""

from __future__ import annotations

import numpy as np

from ...conf.errors import ConfigError
from ...conf.workloads import FixedConfig, ShareGptConfig, TraceConfig, WorkloadConfig, ZipfConfig
from ...models.tokenizer import Tokenizer
from . import fixed, sharegpt, trace, zipf
from .arrivals import arrivals
from .workload import DrawnRequests, Workload

_DEFAULT_NUM_PROMPTS = 100  # of a workload without a file


def make_workload(config: WorkloadConfig, *, vocab_size: int, context: int, tokenizer: Tokenizer) -> Workload:
    """Make the requests of `config` for a model. The same config gives the same requests on any machine.

    `context` is the largest number of tokens that a request may have, prompt and output together. Drawn lengths must
    fit into it. Longer requests of a file are cut: the prompt first, and the output where no prompt would be left.

    Raises:
        ConfigError: drawn lengths do not fit (the error names some that do), or a file is missing, damaged or too
            short.
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
        priorities=config.priorities,
        deadline=None if config.deadline_ms is None else config.deadline_ms / 1e3,
        num_cut=int(np.count_nonzero(drawn.inputs + drawn.outputs > context)),
        prompts=drawn.prompts,
        prefixes=drawn.prefixes,
    )


def _draw(config: WorkloadConfig, context: int, tokenizer: Tokenizer) -> DrawnRequests:
    num_requests = config.num_prompts
    if isinstance(config, TraceConfig):
        return trace.draw(config, num_requests)
    if isinstance(config, ShareGptConfig):
        return sharegpt.draw(config, num_requests, tokenizer)
    room = f"and one may have {context} (model.max_model_len, or what the KV cache holds)"
    if isinstance(config, FixedConfig):
        if (longest := fixed.longest(config)) > context:
            raise ConfigError(
                f"workload=fixed: requests come to {longest} tokens, {room}; {fixed.fitting(config, context)}"
            )
        return fixed.draw(config, num_requests or _DEFAULT_NUM_PROMPTS)
    assert isinstance(config, ZipfConfig), config
    if config.max_len > context:
        fits = f"workload.max_len={context} fits" if config.min_len <= context else "lower min_len too"
        raise ConfigError(f"workload.max_len={config.max_len}: requests come to it, {room}; {fits}")
    return zipf.draw(config, num_requests or _DEFAULT_NUM_PROMPTS)
