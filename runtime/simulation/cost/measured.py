"""Reads operator times and the host's times from a profile. `interpolation.py` interpolates between its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from ....conf.architecture import Architecture
from ....conf.errors import ConfigError
from ....conf.user_path import user_path
from ....parallel.placement import StageLink, nodes_of_a_stage
from .error import CostError
from .interpolation import ChunkAttention, Curve, DecodeAttention, medians
from .operators import LAYER_LINEARS, HostTimes, Linear
from .profile_folder import OperatorSample, ProfileFolder, StageSample, shape_of
from .stage_costs import StageCosts

_TWIN = 0.05  # allowed relative error of a simulated twin's makespan and busy time


class MeasuredOperators:
    """Operator times interpolated between the medians of a profile's samples. An `Operators`.

    Args:
        sends: by number of rows, seconds to send them to the next stage. None or empty: not measured.
        host: the host's times in the real pipeline (`measured_host`); None: only what the samples show.

    Raises:
        ValueError: too few samples to predict every operator.
    """

    def __init__(
        self,
        samples: Sequence[OperatorSample],
        sends: Mapping[int, float] | None = None,
        host: HostTimes | None = None,
    ) -> None:
        if not samples:
            raise ValueError("no samples")
        first, last = min(s.stage for s in samples), max(s.stage for s in samples)
        self._linear: dict[Linear, Curve] = {
            name: Curve(medians((s.point.rows, s.seconds[name]) for s in samples)) for name in LAYER_LINEARS
        }
        sampled = [s for s in samples if s.stage == last and s.point.decodes]
        self._linear["head"] = Curve(medians((s.point.decodes, s.seconds["head"]) for s in sampled))
        self.others = Curve(medians((s.point.rows, s.seconds["others"]) for s in samples))
        first_stage = [s for s in samples if s.stage == first]
        self.embedding = Curve(medians((s.point.rows, s.seconds["embedding"]) for s in first_stage))
        self.host = host or HostTimes(step=median(s.seconds["step"] for s in samples))
        chunks = [s for s in samples if s.point.chunk and not s.point.decodes]
        self.chunk_attention = ChunkAttention(
            medians(((s.point.chunk, s.point.prefix), s.seconds["attn"]) for s in chunks)
        )
        decodes = [s for s in samples if s.point.decodes and not s.point.chunk]
        self.decode_attention = DecodeAttention(
            medians(((s.point.decodes, s.point.context), s.seconds["attn"]) for s in decodes)
        )
        self._sends = Curve(sends) if sends else None

    def routing(self, rows: int) -> float:
        """Return 0: profiles of MoE models are not supported."""
        return 0.0

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`. Each chunk takes as long as alone."""
        return sum(self.chunk_attention(length, prefix) for length, prefix in chunks)

    def linear(self, operator: Linear, rows: int) -> float:
        """See `Operators.linear`."""
        return self._linear[operator](rows)

    @property
    def has_sends(self) -> bool:
        """Whether the profile has measured sends between stages."""
        return self._sends is not None

    def all_reduce(self, rows: int) -> float:
        """Return 0: the measured times of postproj, ffn_ln2 and the embedding include their all-reduce."""
        return 0.0

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """Return the seconds of a send as measured within a node, also for a link between nodes."""
        assert self._sends is not None, "stages without a measured send"
        return self._sends(rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a simulation reads from a profile folder."""

    hardware: str  # the name of the hardware config that was profiled
    operators: MeasuredOperators
    error: CostError


def read_measured(
    path: str,
    arch: Architecture,
    *,
    pp: int,
    tp: int,
    dtype: str,
    quantization: str | None = None,
    cache_dtype: str = "auto",
    devices_per_node: int = 8,
) -> Measured:
    """Read a profile folder for a model of `arch` in `dtype`, with `tp` tensor-parallel ranks and `pp` stages.

    Raises:
        ConfigError: no profile, a damaged or unfinished one, one of another model, or one whose stages were on another
            number of nodes.
    """
    key = f"simulation.profile={path}"
    folder = ProfileFolder(user_path(path, "simulation.profile"), key)
    about = folder.about()
    numbers = {"dtype": about.dtype, "quantization": about.quantization, "cache.dtype": about.cache_dtype}
    asked = {"dtype": dtype, "quantization": quantization, "cache.dtype": cache_dtype}
    for name, wanted in {**shape_of(arch), "tp": tp, **asked}.items():
        found = {**about.shape, "tp": about.tp, **numbers}.get(name)
        if found != wanted:
            raise ConfigError(f"{key}: measured {about.model} with {name}={found}; this model has {name}={wanted}")
    if (nodes := nodes_of_a_stage(tp, devices_per_node)) != about.nodes:
        raise ConfigError(
            f"{key}: measured all-reduces of stages over {_nodes(about.nodes)}; with cluster.devices_per_node="
            f"{devices_per_node} and parallel.tp={tp} a stage spans {_nodes(nodes)}"
        )
    measured = _read(folder.path, key, about.hardware, folder.num_bytes)
    if pp > 1 and not measured.operators.has_sends:
        raise ConfigError(f"{key}: has no sends between stages; gapless profile parallel=pp2 measures them")
    return measured


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number > 1 else ''}"


@lru_cache(maxsize=4)  # each policy and each point of a sweep reads the same profile
def _read(path: Path, key: str, hardware: str, num_bytes: int) -> Measured:
    """Read the folder. `num_bytes` is part of the cache's key, so that a profile that has grown is read again."""
    folder = ProfileFolder(path, key)
    samples, stages, layers = folder.operators(), folder.stages(), folder.about().layers
    try:
        operators = MeasuredOperators(samples, send_seconds(stages), measured_host(samples, layers, stages))
    except ValueError:
        raise ConfigError(f"{key}: unfinished; gapless profile with the same settings resumes it") from None
    return Measured(hardware, operators, stage_error(operators, layers, stages))


def measured_host(samples: Sequence[OperatorSample], layers: Sequence[int], stages: Sequence[StageSample]) -> HostTimes:
    """Derive the host times from a profile instead of from constants.

    `stretch` is how many times longer kernels take in the pipeline than alone. `row` is 0, since LM-head times include
    sampling. `layer` is 0, since operator times start at the launch on the host. `dispatch`, `result`
    and `turnaround` are medians over micro-batches through the real pipeline, or 0 if none were measured; `result` and
    `turnaround` only over those measured with several in flight, if there are any.

    Raises:
        ValueError: too few samples to predict every operator.
    """
    alone = MeasuredOperators(samples)
    stretch = pace(alone, layers, stages)
    last = max((sample.stage for sample in stages), default=0)
    crowded = [sample for sample in stages if sample.in_flight > 1] or stages

    def middle(seconds: list[float]) -> float:
        return median(seconds) if seconds else 0.0

    return HostTimes(
        step=stretch * alone.host.step,
        stretch=stretch,
        dispatch=middle([s.wait for s in stages if s.stage == 0 and s.bound == "input"]),
        result=middle([s.result for s in crowded if s.stage == last and s.result is not None]),
        turnaround=middle([s.wait for s in crowded if s.bound == "stage"]),
    )


def pace(operators: MeasuredOperators, layers: Sequence[int], stages: Sequence[StageSample]) -> float:
    """Return how many times longer micro-batches take in the real pipeline than their operators take alone.

    They take longer since the CPU's caches are colder after a message than after a micro-batch, and since the
    coordinator runs alongside the ranks. The ratio is of total times: outliers count, since runs have them too. It is
    1 if no micro-batches were measured with several in flight.
    """
    costs = StageCosts(layers, [operators] * len(layers))
    crowded = [sample for sample in stages if sample.in_flight > 1]
    predicted = sum(costs.seconds(sample.point.shape)[sample.stage] for sample in crowded)
    return sum(sample.compute for sample in crowded) / predicted if crowded else 1.0


def stage_error(operators: MeasuredOperators, layers: Sequence[int], stages: Sequence[StageSample]) -> CostError:
    """Return the error of `operators` on whole micro-batches of chunks and decodes, which were not fitted.

    Without such micro-batches it is the tolerance for simulated twins of real runs (docs/simulate.md).
    """
    costs = StageCosts(layers, [operators] * len(layers))
    measured = medians(((s.point, s.stage), s.compute) for s in stages if s.point.chunk and s.point.decodes)
    if not measured:
        return CostError(-_TWIN, _TWIN, "the tolerance for twins of real runs; the profile has no whole stages")
    predicted = {point: costs.seconds(point.shape) for point, _ in measured}
    ratios = [seconds / predicted[point][stage] for (point, stage), seconds in measured.items()]
    return CostError.from_ratios(ratios, f"on the profile's {len(ratios)} whole stages, which were not fitted")


def send_seconds(stages: Sequence[StageSample]) -> dict[int, float]:
    """Return, by number of rows, the median seconds from the end of a stage to the start of the next.

    Only micro-batches that were alone in the pipeline count.
    """
    alone = [s for s in stages if s.in_flight == 1 and s.stage > 0]
    return medians((s.point.rows, s.wait) for s in alone)
