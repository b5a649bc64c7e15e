"""The plan of a config, made before anything heavy starts: architecture, layer split, KV blocks, slot bound."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...conf.architecture import Architecture, LayerKind
from ...conf.build import load_hardware
from ...conf.errors import ConfigError
from ...conf.policies import EqualTimeConfig
from ...conf.profiling import ProfileConfig
from ...conf.schema import Dtype, EngineConfig, HardwareConfig, ModelConfig, ParallelConfig, SimulateConfig
from ...kernels.weight_format import WeightFormat
from ...models.block_groups import ONE_TABLE, Windows, blocks_held, group_windows
from ...models.huggingface import has_short_weights, resolve_architecture, resolve_weights
from ...models.layout import tensor_shapes
from ...models.memory import BYTES, MemoryModel, resolve_dtype
from ...models.open_checkpoint import open_source, stated_formats
from ...models.quantization.formats import ModelFormats, cut_too_small, model_formats
from ...models.tokenizer import load_tokenizer
from ...parallel.split import check_parallel, split_layers
from ..core.block_pool import BlockPool
from ..core.windowed_pool import WindowedPool
from ..pipeline.handshake import Setup
from ..scheduler.base import Limits
from ..scheduler.learned.stage_fit import read_profile
from ..scheduler.policies import find_policy
from .layer_times import layer_times

_log = logging.getLogger(__name__)

# Room for keys and values that a split by the stages' speed leaves, for each stage. With less, too few sequences run to
# keep the stages busy. In simulations of Llama-2 70B and LLaMA 33B over an A100 or A6000 and an H100 or H200, `sarathi`
# is within 4% of the fastest split with this room. With the room of one context it takes up to 2.2 times as long (a
# context is 4,096 or 2,048 tokens), and with 65,536 tokens up to 1.07 times.
_KV_TOKENS_A_STAGE = 16_384


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config comes to on its model, hardware and memory.

    `limits.batch` is B, the most requests of one micro-batch.
    """

    arch: Architecture
    layers: tuple[range, ...]
    num_blocks: int
    block_size: int
    replicate_embedding: bool  # on each rank of the first stage
    limits: Limits
    tokenizer: str | None  # its path; None: UTF-8 bytes
    prefix_caching: bool = False
    dtype: Dtype = "float32"  # of weights that are not quantized, and of activations
    formats: ModelFormats | None = None  # of a rank's quantized matrices; None: there are none
    windows: Windows = ONE_TABLE  # of the groups of layers that have block tables of their own
    cuts_prompts: bool = True  # whether the policy does

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request that the model takes; the KV cache may hold fewer."""
        return self.arch.max_position

    @property
    def room(self) -> int:
        """Most tokens of a request, P + D: the context, or fewer where the cache holds no more."""
        promised = self.windows if self.cuts_prompts else (None,) * len(self.windows)
        lengths = range(1, self.max_model_len + 1)
        return bisect_right(lengths, self.num_blocks, key=lambda n: blocks_held(n, promised, self.block_size))

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds of requests of the whole context."""
        longest = self.max_model_len
        return self.num_blocks * self.block_size * longest // blocks_held(longest, self.windows, 1)

    def kind(self, layer: int) -> tuple[LayerKind, WeightFormat | None]:
        """Return what a layer's times depend on: its kind, and the format that most of its weights have."""
        return self.arch.kind(layer), None if self.formats is None else self.formats.layers[layer].fc1

    def make_pool(self) -> BlockPool:
        """Make the pool of all KV blocks, free, with lanes as long as the longest request."""
        lane = -(-self.max_model_len // self.block_size)
        if self.windows == ONE_TABLE:
            return BlockPool(self.num_blocks, self.block_size, lane, prefix_caching=self.prefix_caching)
        return WindowedPool(
            self.num_blocks,
            self.block_size,
            lane,
            windows=self.windows,
            prefix_caching=self.prefix_caching,
            whole=not self.cuts_prompts,
        )


def make_plan(config: EngineConfig, *, quiet: bool = False) -> Plan:
    """Check a config against itself, the checkpoint and the memory, and return its plan.

    Args:
        config: of the run, or of one of its policies.
        quiet: log nothing, as another plan of the run has logged it.

    Raises:
        ConfigError: one line naming what does not fit, and what would.
    """
    cache, hardware, stages = config.cache, config.hardware, stage_hardware(config)
    simulated = isinstance(config, SimulateConfig)
    path = resolve_weights(config.model, tensors=not simulated)
    arch = resolve_architecture(config.model, tensors=not simulated)
    check_parallel(arch, config.parallel, copies_heads=simulated)
    if cache.dtype != "auto" and arch.latent:
        raise ConfigError(f"cache.dtype={cache.dtype}: latents are not held in 8 bits yet; must be auto for this model")
    if config.model.quantization == "fp8" and hardware.device == "cpu" and not simulated:
        raise ConfigError("model.quantization=fp8: must be null, int8 or int4 on a CPU, which has no products of FP8")
    if (name := config.model.attention) in ("flash", "xformers"):
        if hardware.device != "cuda":
            raise ConfigError(f"model.attention={name}: runs on CUDA only; use sdpa or auto on hardware.device=cpu")
        if config.model.dtype == "float32":
            raise ConfigError(f"model.attention={name}: runs in bfloat16 and float16; use sdpa or auto for float32")
        if cache.dtype != "auto":
            raise ConfigError(
                f"cache.dtype={cache.dtype}: model.attention={name} reads keys in the model's dtype; use sdpa or auto"
            )
    tokenizer = config.model.tokenizer or (str(path) if path else None)
    format_of = stated_formats(path, arch, config.model.quantization)
    if path is not None and not simulated:
        source = open_source(path, arch, config.seed, config.model.quantization)
        source.check(arch, tensor_shapes(arch))
        format_of = source.format
    tp, whole = config.parallel.tp, config.parallel.expert_parallel
    formats = model_formats(format_of, arch, tp, hardware.device, whole_experts=whole)
    if tokenizer is not None and not simulated and not arch.eos_token_ids:
        ids = load_tokenizer(tokenizer, arch.vocab_size).eos_token_ids
        arch = replace(arch, eos_token_ids=tuple(i for i in ids if i < arch.vocab_size))
    policy = find_policy(config.scheduler)
    if isinstance(config.scheduler, EqualTimeConfig):
        read_profile(config.scheduler.profile, config.parallel.pp)
    counts_work = hardware.device == "cuda" and not simulated
    max_rows = config.scheduler.batch_of(config.scheduler.max_batch, depth=1) if counts_work else 0
    dtype = resolve_dtype(config.model, hardware.device)
    if not quiet:
        _warn_of_long_factors(arch)
        if (cut := cut_too_small(format_of, arch, tp, whole_experts=whole)) is not None:
            _log.warning(cut)
        if not simulated:
            _say_float32(config.model, dtype)
    memory = MemoryModel(arch, config.parallel, stages, BYTES[dtype], max_rows, formats, cache.dtype)
    layers = _split(config, memory, stages)
    parallel = replace(config.parallel, layers=tuple(len(each) for each in layers))
    windows = ONE_TABLE if isinstance(config, ProfileConfig) else group_windows(arch, layers)  # its messages have one
    memory = replace(memory, parallel=parallel, windows=windows)
    depth = config.scheduler.depth(parallel.pp, parallel.depth)
    if cache.num_blocks is None:
        slots, fitting = memory.slots(), memory.blocks(config.block_size)
    else:
        slots = cache.num_blocks * config.block_size // blocks_held(arch.max_position, windows, 1)
        fitting = cache.num_blocks
    batch = config.scheduler.batch_of(slots, depth.most)
    promised = windows if policy.cuts_prompts else (None,) * len(windows)
    useful = batch * depth.most * blocks_held(arch.max_position, promised, config.block_size)
    num_blocks = min(fitting, useful)
    if cache.num_blocks is not None:
        memory.check_blocks(config.block_size, num_blocks)
    return Plan(
        arch=arch,
        layers=tuple(layers),
        num_blocks=num_blocks,
        block_size=config.block_size,
        replicate_embedding=memory.replicates_embedding(),
        dtype=dtype,
        formats=formats,
        limits=Limits(batch, depth, tile=hardware.tile, stages=parallel.pp),
        tokenizer=tokenizer,
        prefix_caching=cache.prefix_caching,
        windows=windows,
        cuts_prompts=policy.cuts_prompts,
    )


def _split(config: EngineConfig, memory: MemoryModel, stages: Sequence[HardwareConfig]) -> list[range]:
    """Return the layers of each stage, by their times and as far as memory allows."""
    arch, pp, speeds = memory.arch, config.parallel.pp, _speeds(config.parallel, stages)
    counts = config.parallel.layer_counts(arch.num_layers)
    if counts is not None or pp == 1:
        return split_layers(arch, pp, counts)
    assert memory.formats is not None, "a plan knows them"
    times = layer_times(
        config, arch, memory.formats, memory.dtype_bytes, replicate_embedding=memory.replicates_embedding()
    )
    layers = split_layers(arch, pp, None, speeds=speeds, times=times)
    found = [len(each) for each in layers]
    if len({each.memory_gib for each in stages}) > 1 or max(found) - min(found) > 1:
        layers = split_layers(arch, pp, None, speeds=speeds, most=_most_layers(memory, config), times=times)
    return layers


def _say_float32(model: ModelConfig, dtype: str) -> None:
    """Log a line where `auto` is not the checkpoint's type, since the processor is slow in it."""
    if model.dtype == "auto" and dtype == "float32" and has_short_weights(model):
        _log.info(
            "model.dtype=auto: float32, though the checkpoint has 16 bits or fewer: this processor has neither AVX-512 "
            "BF16 nor AMX"
        )


def _warn_of_long_factors(arch: Architecture) -> None:
    """Say that a model whose rotary positions depend on the context computes all requests as long ones."""
    scaling = arch.kind(0).rope_scaling
    if scaling is not None and scaling.type == "longrope" and arch.max_position > scaling.original_max_position:
        _log.warning(
            "longrope: requests of up to %d tokens turn by the long factors too, since longer ones may come; "
            "model.max_model_len=%d has the short ones",
            scaling.original_max_position,
            scaling.original_max_position,
        )


def _speeds(parallel: ParallelConfig, stages: Sequence[HardwareConfig]) -> list[float] | None:
    """Return the relative speed of each stage; None where all are alike, or where one of them is not known."""
    speeds = list(parallel.stage_speeds) if parallel.stage_speeds is not None else [each.speed for each in stages]
    known = [speed for speed in speeds if speed is not None]
    return known if len(known) == len(speeds) and len(set(known)) > 1 else None


def _most_layers(memory: MemoryModel, config: EngineConfig) -> list[int]:
    """Return how many layers each stage may take so that the KV cache has the blocks that it should have.

    These are `cache.num_blocks`, or else `_KV_TOKENS_A_STAGE` tokens for each stage and a sequence of the whole context
    at least. Where no split leaves room for them, they are the most that one leaves room for.
    """

    def most(num_blocks: int) -> list[int]:
        return memory.most_layers(num_blocks * config.block_size)

    if config.cache.num_blocks is not None:
        return most(config.cache.num_blocks)
    least = -(-memory.arch.max_position // config.block_size)
    wanted = max(least, config.parallel.pp * _KV_TOKENS_A_STAGE // config.block_size)
    too_many = bisect_left(
        range(least + 1, wanted + 1), True, key=lambda num_blocks: sum(most(num_blocks)) < memory.arch.num_layers
    )
    return most(least + too_many)


def stage_hardware(config: EngineConfig) -> list[HardwareConfig]:
    """Return the hardware of each stage's ranks.

    Raises:
        ConfigError: `simulation.devices` names unknown hardware.
    """
    if not isinstance(config, SimulateConfig) or config.simulation.devices is None:
        return [config.hardware] * config.parallel.pp
    return [load_hardware(name, "simulation.devices") for name in config.simulation.devices]


def make_setup(config: EngineConfig, plan: Plan) -> Setup:
    """Make the message that sets up the ranks of a plan; the store's address is filled in once it is known."""
    return Setup(
        pp=config.parallel.pp,
        tp=config.parallel.tp,
        model=replace(config.model, dtype=plan.dtype),
        arch=plan.arch,
        layers=[(layers.start, layers.stop) for layers in plan.layers],
        depth=plan.limits.depth.most,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        replicate_embedding=plan.replicate_embedding,
        seed=config.seed,
        threads=config.parallel.threads,
        timeout_s=config.parallel.start_timeout_s + config.parallel.step_timeout_s,
        tokenizer=plan.tokenizer,
        cache_dtype=config.cache.dtype,
        expert_parallel=config.parallel.expert_parallel,
        windows=plan.windows,
    )
