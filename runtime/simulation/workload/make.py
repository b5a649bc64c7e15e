"""Makes a workload from its config: draws lengths and arrivals, and truncates a file's requests to the context."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ....conf.errors import ConfigError
from ....conf.workloads import FixedConfig, ShareGptConfig, TraceConfig, WorkloadConfig, ZipfConfig
from ....models.tokenizer import Tokenizer
from ...core.prefix_ids import PrefixIds
from . import fixed, sharegpt, trace, zipf
from .arrivals import arrivals
from .workload import DrawnRequests, Workload

_DEFAULT_NUM_PROMPTS = 100  # without a workload file
_ENDLESS = 1_000_000  # requests drawn if the workload is limited by duration, not by number


def make_workload(config: WorkloadConfig, *, vocab_size: int, context: int, tokenizer: Tokenizer) -> Workload:
    """Make the requests of `config` for a model. The same config gives the same requests on any machine.

    `context` is the largest number of tokens that a request may have, prompt and output together. Drawn lengths must
    fit into it. Longer requests of a file are truncated: the prompt first, then the output if no prompt would be left.

    Raises:
        ConfigError: drawn lengths do not fit (the error names some that do), or a file is missing, damaged or too
            short.
    """
    warmup, distinct = config.warmup_requests, config.distinct_prompts
    is_file = isinstance(config, TraceConfig | ShareGptConfig)
    wanted = config.num_prompts
    if wanted is None and (not is_file or distinct is not None):
        goes_on = config.max_concurrency is not None or math.isfinite(config.request_rate or math.inf)
        wanted = _ENDLESS if goes_on and config.duration_s is not None else _DEFAULT_NUM_PROMPTS
    if wanted is not None:
        wanted += warmup
    drawn = _draw(config, wanted if distinct is None else distinct, context, tokenizer)
    inputs = np.clip(context - drawn.outputs, 1, drawn.inputs)
    outputs = np.minimum(drawn.outputs, context - inputs)
    times, prefixes, entries = drawn.times, drawn.prefixes, None
    if distinct is not None:
        assert wanted is not None
        rounds, entries = np.divmod(np.arange(wanted), len(inputs))
        prefixes = prefixes or [PrefixIds([number], length) for number, length in enumerate(inputs.tolist())]
        inputs, outputs = inputs[entries], outputs[entries]
        if times is not None:  # rounds are separated by the trace's mean gap
            times = times[entries] + rounds * times[-1] * (1 + 1 / max(1, len(times) - 1))
    whole = Workload(
        input_lens=inputs,
        output_lens=outputs,
        arrivals=arrivals(config, len(inputs), times),
        vocab_size=vocab_size,
        seed=config.seed,
        users=config.users,
        priorities=config.priorities,
        deadline=None if config.deadline_ms is None else config.deadline_ms / 1e3,
        num_cut=int(np.count_nonzero(drawn.inputs + drawn.outputs > context)),
        entries=entries,
        prompts=drawn.prompts,
        prefixes=prefixes,
    )
    if warmup >= len(whole):
        raise ConfigError(f"workload.warmup_requests={warmup}: must be fewer than the file's {len(whole)} requests")
    measured = replace(whole.part(slice(warmup, None)), warmup=whole.part(slice(warmup))) if warmup else whole
    if config.duration_s is None or config.max_concurrency is not None:
        return measured
    in_time = slice(int(np.searchsorted(measured.arrivals, config.duration_s)))
    return replace(measured.part(in_time), warmup=measured.warmup)


def _draw(config: WorkloadConfig, num_requests: int | None, context: int, tokenizer: Tokenizer) -> DrawnRequests:
    if isinstance(config, TraceConfig):
        return trace.draw(config, num_requests)
    if isinstance(config, ShareGptConfig):
        return sharegpt.draw(config, num_requests, tokenizer)
    assert num_requests is not None
    room = f"but a request may have {context} (model.max_model_len or KV-cache capacity)"
    if isinstance(config, FixedConfig):
        if (longest := fixed.longest(config)) > context:
            raise ConfigError(
                f"workload=fixed: requests have up to {longest} tokens, {room}; {fixed.fitting(config, context)}"
            )
        return fixed.draw(config, num_requests)
    assert isinstance(config, ZipfConfig), config
    if config.max_len > context:
        fits = f"workload.max_len={context} fits" if config.min_len <= context else "lower min_len too"
        raise ConfigError(f"workload.max_len={config.max_len}: some requests have this length, {room}; {fits}")
    return zipf.draw(config, num_requests)
