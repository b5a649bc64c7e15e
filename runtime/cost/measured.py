"""Reads operator times and the host's times from a profile. `interpolation.py` fills in between its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from ...conf.errors import ConfigError
from ...conf.schema import Architecture
from ...parallel.placement import StageLink, nodes_of_a_stage
from .interpolation import ChunkAttention, Curve, DecodeAttention, medians
from .operators import LAYER_LINEARS, HostTimes, Linear
from .profile_folder import OperatorSample, ProfileFolder, StageSample, shape_of
from .stage_costs import StageCosts


@dataclass(frozen=True, slots=True)
class Control:
    """The host's times between micro-batches, in seconds."""

    dispatch: float = 0.0  # from the coordinator's dispatch to the begin of the first stage's compute
    result: float = 0.0  # from the end of the last stage's compute until the coordinator has the result
    turnaround: float = 0.0  # from the end of a stage's micro-batch to the begin of its next, whose input is there

    @classmethod
    def of(cls, samples: Sequence[StageSample]) -> Control:
        """Return the medians of `samples`, and 0 for a time that none of them has.

        Result and turnaround are those of micro-batches that followed each other closely, where there are any.
        """
        last = max((sample.stage for sample in samples), default=0)
        crowded = [sample for sample in samples if sample.in_flight > 1] or samples
        dispatch = [s.wait for s in samples if s.stage == 0 and s.bound == "input"]
        result = [s.result for s in crowded if s.stage == last and s.result is not None]
        turnaround = [s.wait for s in crowded if s.bound == "stage"]
        return cls(*(median(seconds) if seconds else 0.0 for seconds in (dispatch, result, turnaround)))


class MeasuredOperators:
    """Operator times interpolated between the medians of a profile's samples. An `Operators`.

    A layer's host overhead is 0, since measured operator times include it.

    Args:
        sends: by number of rows, seconds to send them to the next stage. None or empty: not measured.

    Raises:
        ValueError: too few samples to predict every operator.
    """


    def __init__(self, samples: Sequence[OperatorSample], sends: Mapping[int, float] | None = None) -> None:
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
        self.host = HostTimes(step=median(s.seconds["step"] for s in samples))
        chunks = [s for s in samples if s.point.chunk and not s.point.decodes]
        self.chunk_attention = ChunkAttention(
            medians(((s.point.chunk, s.point.prefix), s.seconds["attn"]) for s in chunks)
        )
        decodes = [s for s in samples if s.point.decodes and not s.point.chunk]
        self.decode_attention = DecodeAttention(
            medians(((s.point.decodes, s.point.context), s.seconds["attn"]) for s in decodes)
        )
        self._sends = Curve(sends) if sends else None

    def linear(self, operator: Linear, rows: int) -> float:
        return self._linear[operator](rows)

    @property
    def has_sends(self) -> bool:
        return self._sends is not None

    def all_reduce(self, rows: int) -> float:
        """Return 0: the measured times of postproj, ffn_ln2 and the embedding include their all-reduce."""
        return 0.0

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """Return the seconds of a send within the profiled node, for a link between nodes too."""
        assert self._sends is not None, "stages without a measured send"
        return self._sends(rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """The times that a simulation takes from a profile folder."""

    hardware: str  # the name of the hardware config that was profiled
    operators: MeasuredOperators
    control: Control


def read_measured(
    path: str, arch: Architecture, *, pp: int, tp: int, dtype: str, devices_per_node: int = 8
) -> Measured:
    """Read a profile folder for a model of `arch` in `dtype`, in `tp` slices, over `pp` stages.

    Raises:
        ConfigError: no profile, a damaged or unfinished one, one of another model, or one whose stages were on another
            number of nodes.
    """
    key = f"simulation.profile={path}"
    folder = ProfileFolder(Path(path).expanduser(), key)
    about = folder.about()
    for name, wanted in {**shape_of(arch), "tp": tp, "dtype": dtype}.items():
        found = {**about.shape, "tp": about.tp, "dtype": about.dtype}.get(name)
        if found != wanted:
            raise ConfigError(f"{key}: measured {about.model} with {name}={found}; this model has {name}={wanted}")
    if (nodes := nodes_of_a_stage(tp, devices_per_node)) != about.nodes:
        raise ConfigError(
            f"{key}: measured all-reduces of stages over {_nodes(about.nodes)}; cluster.devices_per_node="
            f"{devices_per_node} and parallel.tp={tp} come to {_nodes(nodes)}"
        )
    measured = _read(folder.path, key, about.hardware, folder.num_bytes)
    if pp > 1 and not measured.operators.has_sends:
        raise ConfigError(f"{key}: holds no sends between stages; gapless profile parallel=pp2 measures them")
    return measured


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number > 1 else ''}"


@lru_cache(maxsize=4)  # each policy and each point of a sweep reads the same profile
def _read(path: Path, key: str, hardware: str, num_bytes: int) -> Measured:
    """Read the folder. `num_bytes` is part of the cache's key, so that a profile that has grown is read again."""
    folder = ProfileFolder(path, key)
    samples, stages = folder.operators(), folder.stages()
    try:
        slowdown = pace(MeasuredOperators(samples), folder.about().layers, stages)
        operators = MeasuredOperators([sample.scaled(slowdown) for sample in samples], send_seconds(stages))
    except ValueError:
        raise ConfigError(f"{key}: unfinished; gapless profile with the same settings goes on where it ended") from None
    return Measured(hardware, operators, Control.of(stages))


def pace(operators: MeasuredOperators, layers: Sequence[int], stages: Sequence[StageSample]) -> float:
    """Return how many times longer micro-batches take in the real pipeline than their operators take by themselves.

    They take longer since the CPU's caches are colder after a message than after a micro-batch, and since the
    coordinator computes beside the ranks. The ratio is of total times: outliers count, since runs have them too. It is
    1 where no micro-batches were measured that follow each other closely.
    """
    costs = StageCosts(layers, [operators] * len(layers))
    crowded = [sample for sample in stages if sample.in_flight > 1]
    predicted = sum(costs.seconds(sample.point.shape)[sample.stage] for sample in crowded)
    return sum(sample.compute for sample in crowded) / predicted if crowded else 1.0


def send_seconds(stages: Sequence[StageSample]) -> dict[int, float]:
    """Return, by number of rows, the median seconds from the end of a stage to the begin of the next.

    Only micro-batches that were alone in the pipeline count.
    """
    alone = [s for s in stages if s.in_flight == 1 and s.stage > 0]
    return medians((s.point.rows, s.wait) for s in alone)
