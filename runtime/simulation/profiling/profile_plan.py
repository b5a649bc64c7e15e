"""The plan of a profile, made from its config: the ranks that measure, their stages and their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....conf.architecture import Architecture
from ....conf.errors import ConfigError
from ....conf.profiling import ProfileConfig
from ....kernels import cores
from ....models.memory import BYTES, MemoryModel
from ....models.stage_spec import StageSpec
from ....parallel.placement import nodes_of_a_stage
from ...engine.plan import Plan, make_plan
from ...pipeline.handshake import Setup
from ..cost.profile_folder import About, shape_of
from ..cost.profile_point import Point
from .grid import mixed_points, operator_points, sent_points

_MAX_LAYERS = 8  # enough to evict a layer's weights from the CPU's caches before it runs again
_FILL_CHUNK_TOKENS = 512  # per chunk, to write the pipeline's whole KV cache


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What a profile measures: operators on ranks of their own, then whole micro-batches through the pipeline."""

    about: About
    setup: Setup  # of the ranks that measure operators
    operators: list[Point]  # of those ranks
    config: ProfileConfig  # of the pipeline, whose KV cache is just large enough for `mixed` and `sent`
    plan: Plan  # of the pipeline
    mixed: list[Point]  # run through the pipeline back to back
    sent: list[Point]  # run through the pipeline one at a time

    @property
    def fill(self) -> list[tuple[Point, int]]:
        """Chunks that together write the pipeline's whole KV cache, each with its first block."""
        block = self.config.block_size
        size = max(block, min(_FILL_CHUNK_TOKENS, self.setup.stages[0].arch.max_position) // block * block)
        starts = range(0, self.plan.num_blocks, size // block)
        return [(Point(chunk=min(size, (self.plan.num_blocks - start) * block)), start) for start in starts]


def plan_profile(config: ProfileConfig) -> ProfilePlan:
    """Check a profile's config and make its plan.

    Raises:
        ConfigError: as `make_plan`, or the grid does not fit the model or the memory.
    """
    plan, hardware, parallel, block = make_plan(config), config.hardware, config.parallel, config.block_size
    arch = plan.arch
    if arch.experts is not None or arch.latent is not None:
        raise ConfigError(f"model={config.model.name}: gapless profile supports neither experts nor MLA yet")
    stages_per_node = max(1, min(parallel.world_size, config.cluster.devices_per_node) // parallel.tp)
    num_stages = stages_per_node if config.neighbours is None else 1 + config.neighbours
    ranks = num_stages * parallel.tp
    num_layers = config.num_layers or min(_MAX_LAYERS, max(map(len, plan.layers)))
    context = config.max_context or min(arch.max_position, 2 * config.max_tokens)
    if context > arch.max_position:
        raise ConfigError(f"max_context={context}: must be at most the model's {arch.max_position}")
    slice_ = replace(arch, num_layers=num_layers * num_stages)
    grid = replace(parallel, pp=num_stages, layers=(num_layers,) * num_stages, launcher=None)
    assert plan.formats is not None, "it is of a model"
    middle = plan.formats.layers[len(plan.formats.layers) // 2]
    formats = replace(plan.formats, layers=(middle,) * slice_.num_layers)
    memory = MemoryModel(
        slice_, grid, [hardware] * num_stages, BYTES[plan.dtype], formats=formats, cache_dtype=config.cache.dtype
    )
    points = operator_points(config.max_tokens, context, config.max_decodes, hardware.tile)
    operators = _fitting(points, memory.blocks(block), block)
    mixed = _fitting(mixed_points(config.max_tokens, context, config.max_decodes), plan.num_blocks, block)
    sent = sent_points(config.max_tokens, context) if parallel.pp > 1 else []
    threads = parallel.threads or cores.threads(ranks)
    about = About(
        model=config.model.name,
        shape=shape_of(arch),
        dtype=plan.dtype,
        quantization=config.model.quantization,
        cache_dtype=config.cache.dtype,
        attention=config.model.attention,
        hardware=hardware.name,
        device=hardware.device,
        tp=parallel.tp,
        ranks=ranks,
        threads=threads,
        num_layers=num_layers,
        layers=[len(layers) for layers in plan.layers],
        block_size=block,
        nodes=nodes_of_a_stage(parallel.tp, config.cluster.devices_per_node),
    )
    max_slots = max(point.slots(block) for point in (*mixed, *sent))
    small = replace(config, cache=replace(config.cache, num_blocks=max(max_slots, arch.max_position) // block + 1))
    return ProfilePlan(
        about,
        _setup(config, slice_, num_stages, num_layers, threads, operators, plan),
        operators,
        small,
        make_plan(small, quiet=True),
        mixed,
        sent,
    )


def _setup(
    config: ProfileConfig,
    arch: Architecture,
    num_stages: int,
    num_layers: int,
    threads: int,
    points: Sequence[Point],
    plan: Plan,
) -> Setup:
    block, rounded = config.block_size, config.model.quantization
    typical = None if plan.formats is None else plan.formats.typical
    if rounded is None and typical is not None:  # a quantized checkpoint's shapes are measured with random weights
        rounded = "fp8" if typical.is_float else "int8" if typical.bits == 8 else "int4"
    model = replace(
        config.model,
        weights="random",
        architecture=arch,
        dtype=plan.dtype,
        quantization=rounded,
        cuda_graphs=False,  # they hide operators
    )
    specs = [
        StageSpec(
            model=model,
            arch=arch,
            layers=(stage * num_layers, (stage + 1) * num_layers),
            num_blocks=max(point.slots(block) for point in points) // block,
            block_size=block,
            replicate_embedding=plan.replicate_embedding and num_stages > 1,
            seed=config.seed,
            cache_dtype=config.cache.dtype,
        )
        for stage in range(num_stages)
    ]
    timeout = config.parallel.start_timeout_s + config.parallel.step_timeout_s
    return Setup(specs, config.parallel.tp, depth=1, threads=threads, timeout_s=timeout)


def _fitting(points: Sequence[Point], num_blocks: int, block_size: int) -> list[Point]:
    """Return the points whose requests fit into `num_blocks` KV blocks."""
    return [point for point in points if point.slots(block_size) <= num_blocks * block_size]
