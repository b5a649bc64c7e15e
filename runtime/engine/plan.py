"""The plan of a run, made before the pipeline starts: architecture, layer split, KV blocks, batch limits."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...conf.architecture import Architecture, LayerKind
from ...conf.build import load_hardware
from ...conf.errors import ConfigError
from ...conf.profiling import ProfileConfig
from ...conf.schema import Dtype, EngineConfig, HardwareConfig, SimulateConfig
from ...kernels.weight_format import WeightFormat
from ...models.block_groups import ONE_TABLE, Windows, blocks_held, group_windows
from ...models.checkpoint import Checkpoint
from ...models.layout import tensor_shapes
from ...models.memory import BYTES, MemoryModel
from ...models.quantization.formats import FormatOf, ModelFormats, cut_too_small, model_formats
from ...models.stage_spec import StageSpec
from ...models.tokenizer import load_tokenizer
from ...parallel.split import check_parallel
from ..core.block_pool import BlockPool
from ..core.windowed_pool import WindowedPool
from ..pipeline.handshake import Setup
from ..scheduler.limits import Limits
from ..scheduler.policies import find_policy
from .layer_split import balanced_layers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config resolves to for its model, hardware and memory.

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
    dtype: Dtype = "float32"  # of activations and unquantized weights
    formats: ModelFormats | None = None  # of a rank's quantized matrices; None: none are quantized
    windows: Windows = ONE_TABLE  # of the layer groups, each with its own block table
    cuts_prompts: bool = True  # whether the policy uses chunked prefill

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request that the model supports; the KV cache may have room for fewer."""
        return self.arch.max_position

    @property
    def room(self) -> int:
        """Most tokens of a request, P + D: the context, or fewer if the cache has no room for it."""
        promised = self.windows if self.cuts_prompts else (None,) * len(self.windows)
        lengths = range(1, self.max_model_len + 1)
        return bisect_right(lengths, self.num_blocks, key=lambda n: blocks_held(n, promised, self.block_size))

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens, for requests of full context length."""
        longest = self.max_model_len
        return self.num_blocks * self.block_size * longest // blocks_held(longest, self.windows, 1)

    def kind(self, layer: int) -> tuple[LayerKind, WeightFormat | None]:
        """Return what a layer's times depend on: its kind, and the format of most of its weights."""
        return self.arch.kind(layer), None if self.formats is None else self.formats.layers[layer].fc1

    def make_pool(self) -> BlockPool:
        """Make the allocator of all KV blocks, with lanes as long as the longest request."""
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
    """Check a config for consistency and against the checkpoint and the memory, and return its plan.

    Args:
        config: the run's config, or that for one of its policies.
        quiet: log nothing, since another plan of the run has logged it.

    Raises:
        ConfigError: one line that states what does not fit, and what would.
    """
    simulated, stages = isinstance(config, SimulateConfig), stage_hardware(config)
    checkpoint = Checkpoint.open(config.model, tensors=not simulated)
    check_parallel(checkpoint.arch, config.parallel, copies_heads=simulated)
    _check_keys(config, checkpoint.arch)
    format_of = _checked_formats(config, checkpoint)
    arch = checkpoint.arch if simulated else _with_eos_tokens(checkpoint)
    policy = find_policy(config.scheduler)
    dtype = checkpoint.dtype(config.hardware.device)
    if not quiet:
        _warn(config, checkpoint, format_of, dtype)
    memory = _memory(config, arch, format_of, dtype, stages)
    layers = balanced_layers(config, memory, stages)
    parallel = replace(config.parallel, layers=tuple(len(each) for each in layers))
    windows = ONE_TABLE if isinstance(config, ProfileConfig) else group_windows(arch, layers)  # profiling has one table
    memory = replace(memory, parallel=parallel, windows=windows)
    depth = config.scheduler.depth(parallel.pp, parallel.depth)
    batch, num_blocks = _room(config, memory, depth.most, policy.cuts_prompts)
    return Plan(
        arch=arch,
        layers=tuple(layers),
        num_blocks=num_blocks,
        block_size=config.block_size,
        replicate_embedding=memory.replicates_embedding(),
        dtype=dtype,
        formats=memory.formats,
        limits=Limits(batch, depth, tile=config.hardware.tile, num_stages=parallel.pp),
        tokenizer=checkpoint.tokenizer,
        prefix_caching=config.cache.prefix_caching,
        windows=windows,
        cuts_prompts=policy.cuts_prompts,
    )


def _check_keys(config: EngineConfig, arch: Architecture) -> None:
    """Check keys that the model or the hardware may not fit."""
    cache, hardware = config.cache, config.hardware
    if cache.dtype != "auto" and arch.latent:
        raise ConfigError(
            f"cache.dtype={cache.dtype}: 8-bit MLA caches are not supported yet; must be auto for this model"
        )
    if config.model.quantization == "fp8" and hardware.device == "cpu" and not isinstance(config, SimulateConfig):
        raise ConfigError("model.quantization=fp8: must be null, int8 or int4 on a CPU, which has no FP8 GEMMs")
    if (name := config.model.attention) in ("flash", "xformers"):
        if hardware.device != "cuda":
            raise ConfigError(f"model.attention={name}: runs on CUDA only; use sdpa or auto on hardware.device=cpu")
        if config.model.dtype == "float32":
            raise ConfigError(f"model.attention={name}: runs in bfloat16 and float16; use sdpa or auto for float32")
        if cache.dtype != "auto":
            raise ConfigError(
                f"cache.dtype={cache.dtype}: model.attention={name} reads keys in the model's dtype; use sdpa or auto"
            )


def _checked_formats(config: EngineConfig, checkpoint: Checkpoint) -> FormatOf:
    """Check the tensors of a real run, and return the formats of the weights."""
    arch = checkpoint.arch
    if checkpoint.path is None or isinstance(config, SimulateConfig):
        return checkpoint.stated_formats(arch)
    source = checkpoint.tensors(arch, config.seed)
    source.check(arch, tensor_shapes(arch))
    return source.format


def _with_eos_tokens(checkpoint: Checkpoint) -> Architecture:
    """Return the architecture with its end-of-sequence tokens, from the tokenizer if no config specifies them."""
    arch = checkpoint.arch
    if checkpoint.tokenizer is None or arch.eos_token_ids:
        return arch
    ids = load_tokenizer(checkpoint.tokenizer, arch.vocab_size).eos_token_ids
    return replace(arch, eos_token_ids=tuple(i for i in ids if i < arch.vocab_size))


def _memory(
    config: EngineConfig, arch: Architecture, format_of: FormatOf, dtype: Dtype, stages: Sequence[HardwareConfig]
) -> MemoryModel:
    """Return the memory model of a split that is still to be found."""
    parallel, scheduler, device = config.parallel, config.scheduler, config.hardware.device
    formats = model_formats(format_of, arch, parallel.tp, device, whole_experts=parallel.expert_parallel)
    counts_work = device == "cuda" and not isinstance(config, SimulateConfig)
    max_rows = scheduler.batch_of(scheduler.max_batch, depth=1) if counts_work else 0
    return MemoryModel(arch, parallel, stages, BYTES[dtype], max_rows, formats, config.cache.dtype)


def _room(config: EngineConfig, memory: MemoryModel, depth: int, cuts_prompts: bool) -> tuple[int, int]:
    """Return B, the most requests of a micro-batch, and the number of KV blocks that they need or that fit.

    Raises:
        ConfigError: the memory cannot hold `cache.num_blocks`, or one request.
    """
    given, size, longest, windows = config.cache.num_blocks, config.block_size, memory.arch.max_position, memory.windows
    slots = memory.slots() if given is None else given * size // blocks_held(longest, windows, 1)
    fitting = memory.blocks(size) if given is None else given
    batch = config.scheduler.batch_of(slots, depth)
    useful = batch * depth * blocks_held(longest, windows if cuts_prompts else (None,) * len(windows), size)
    num_blocks = min(fitting, useful)
    if given is not None:
        memory.check_blocks(size, num_blocks)
    return batch, num_blocks


def _warn(config: EngineConfig, checkpoint: Checkpoint, format_of: FormatOf, dtype: str) -> None:
    """Log what the user may not expect of the model here."""
    parallel, arch = config.parallel, checkpoint.arch
    _warn_of_long_factors(arch)
    if (cut := cut_too_small(format_of, arch, parallel.tp, whole_experts=parallel.expert_parallel)) is not None:
        _log.warning(cut)
    if not isinstance(config, SimulateConfig):
        _say_float32(checkpoint, dtype)


def _say_float32(checkpoint: Checkpoint, dtype: str) -> None:
    """Log a line if `auto` differs from the checkpoint's dtype because the processor is slow in it."""
    if checkpoint.model.dtype == "auto" and dtype == "float32" and checkpoint.is_short:
        _log.info(
            "model.dtype=auto: float32, though the checkpoint has 16 bits or fewer: this processor has neither AVX-512 "
            "BF16 nor AMX"
        )


def _warn_of_long_factors(arch: Architecture) -> None:
    """Warn that longrope's long factors apply to all requests if the context exceeds the original one."""
    scaling = arch.kind(0).rope_scaling
    if scaling is not None and scaling.type == "longrope" and arch.max_position > scaling.original_max_position:
        _log.warning(
            "longrope: requests of up to %d tokens use the long factors too, since longer ones may come; "
            "model.max_model_len=%d uses the short ones",
            scaling.original_max_position,
            scaling.original_max_position,
        )


def stage_hardware(config: EngineConfig) -> list[HardwareConfig]:
    """Return the hardware of each stage's ranks.

    Raises:
        ConfigError: `simulation.devices` names unknown hardware.
    """
    if not isinstance(config, SimulateConfig) or config.simulation.devices is None:
        return [config.hardware] * config.parallel.pp
    return [load_hardware(name, "simulation.devices") for name in config.simulation.devices]


def make_setup(config: EngineConfig, plan: Plan) -> Setup:
    """Make the message that sets up the ranks of a plan. The store's address is filled in later."""
    stages = [
        StageSpec(
            model=replace(config.model, dtype=plan.dtype),
            arch=plan.arch,
            layers=(layers.start, layers.stop),
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            replicate_embedding=plan.replicate_embedding,
            whole_experts=config.parallel.expert_parallel,
            seed=config.seed,
            cache_dtype=config.cache.dtype,
            windows=plan.windows,
        )
        for layers in plan.layers
    ]
    return Setup(
        stages,
        config.parallel.tp,
        plan.limits.depth.most,
        config.parallel.threads,
        timeout_s=config.parallel.start_timeout_s + config.parallel.step_timeout_s,
        tokenizer=plan.tokenizer,
    )
