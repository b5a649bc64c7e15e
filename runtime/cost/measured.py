"""Operator times from a profile: interpolated within what was measured, beyond it extrapolated by their physics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from ...conf.errors import ConfigError
from ...conf.schema import Architecture
from .interpolation import ChunkAttention, Curve, DecodeAttention, medians
from .operators import LAYER_LINEARS, Linear
from .profile_folder import OperatorSample, ProfileFolder, StageSample, shape_of
from .stage_costs import StageCosts


@dataclass(frozen=True, slots=True)
class Control:
    """The host's share between micro-batches, seconds: from the coordinator to the first stage's compute (`dispatch`),
    from the last stage's end back to it (`result`), and from the end of one micro-batch on a stage to the begin of the
    next that is there already (`turnaround`)."""

    dispatch: float = 0.0
    result: float = 0.0
    turnaround: float = 0.0

    @classmethod
    def of(cls, samples: Sequence[StageSample]) -> Control:
        """Medians, of micro-batches that followed each other closely where there are some; 0 of nothing."""
        last = max((sample.stage for sample in samples), default=0)
        crowded = [sample for sample in samples if sample.in_flight > 1] or samples
        dispatch = [s.wait for s in samples if s.stage == 0 and s.bound == "input"]
        result = [s.result for s in crowded if s.stage == last and s.result is not None]
        turnaround = [s.wait for s in crowded if s.bound == "stage"]
        return cls(*(median(some) if some else 0.0 for some in (dispatch, result, turnaround)))


class MeasuredOperators:
    """`Operators` of a profile's samples: medians of what was measured, interpolated.

    Host time is no part of its own: what a rank's operators take was measured with it.

    Args:
        sends: seconds to the next stage by rows; None or empty where they were not measured.

    Raises:
        ValueError: too few samples to tell every operator's time.
    """

    layer_overhead = 0.0

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
        of_first = [s for s in samples if s.stage == first]
        self.embedding = Curve(medians((s.point.rows, s.seconds["embedding"]) for s in of_first))
        self.micro_batch_overhead = median(s.seconds["step"] for s in samples)
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
        """None of its own: it was measured with the layers that end in it, postproj, ffn_ln2 and the embedding."""
        return 0.0

    def send(self, rows: int, *, between_nodes: bool, scatter_gather: bool) -> float:
        """As from one rank to the next of the node that was profiled, whichever link it is."""
        assert self._sends is not None, "stages without a measured send"
        return self._sends(rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a profile folder gives a simulation; `hardware` is the name of what it was measured on."""

    hardware: str
    operators: MeasuredOperators
    control: Control


def read_measured(path: str, arch: Architecture, *, pp: int, tp: int, dtype: str) -> Measured:
    """A profile for a model of `arch` in `dtype`, cut in `tp` slices, over `pp` stages.

    Raises:
        ConfigError: no profile, a damaged or unfinished one, or one of another model.
    """
    key = f"simulation.profile={path}"
    folder = ProfileFolder(Path(path).expanduser(), key)
    about = folder.about()
    for name, wanted in {**shape_of(arch), "tp": tp, "dtype": dtype}.items():
        had = {**about.shape, "tp": about.tp, "dtype": about.dtype}.get(name)
        if had != wanted:
            raise ConfigError(f"{key}: measured {about.model} with {name}={had}; this model has {name}={wanted}")
    measured = _read(folder.path, key, about.hardware, folder.changed)
    if pp > 1 and not measured.operators.has_sends:
        raise ConfigError(f"{key}: holds no sends between stages; gapless profile parallel=pp2 measures them")
    return measured


@lru_cache(maxsize=4)  # each policy and each point of a sweep asks for it
def _read(path: Path, key: str, hardware: str, changed: int) -> Measured:
    folder = ProfileFolder(path, key)
    samples, stages = folder.operators(), folder.stages()
    try:
        ratio = pace(MeasuredOperators(samples), folder.about().layers, stages)
        operators = MeasuredOperators([sample.times(ratio) for sample in samples], send_seconds(stages))
    except ValueError:
        raise ConfigError(f"{key}: unfinished; gapless profile with the same settings goes on where it ended") from None
    return Measured(hardware, operators, Control.of(stages))


def pace(operators: MeasuredOperators, layers: Sequence[int], stages: Sequence[StageSample]) -> float:
    """How much longer micro-batches take that follow each other through the real pipeline than their operators do in
    place: caches are colder after a message than after a micro-batch, and the coordinator computes beside the ranks.
    Of all of their time together, so outliers count, which a run has too; 1 where none were measured."""
    costs = StageCosts(layers, [operators] * len(layers))
    crowded = [sample for sample in stages if sample.in_flight > 1]
    predicted = sum(costs.seconds(sample.point.load)[sample.stage] for sample in crowded)
    return sum(sample.compute for sample in crowded) / predicted if crowded else 1.0


def send_seconds(stages: Sequence[StageSample]) -> dict[int, float]:
    """Median seconds by rows from the end of a stage to the begin of the next, of micro-batches that were alone."""
    alone = [s for s in stages if s.in_flight == 1 and s.stage > 0]
    return medians((s.point.rows, s.wait) for s in alone)
