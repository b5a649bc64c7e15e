"""The folder of a profile: `profile.yaml` says of what and on what machine, two CSV files hold each measurement."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from ...conf.errors import ConfigError
from ...conf.schema import Architecture
from .profile_point import Point

T = TypeVar("T")

OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others", "embedding", "step", "head", "total")
_ABOUT, _OPERATORS, _STAGES = "profile.yaml", "operators.csv", "stages.csv"
_FORMAT = 1
# What of an architecture a layer's time does not hang on.
_FREE = ("num_layers", "max_position", "bos_token_id", "eos_token_ids", "norm_eps", "rope_theta", "rope_scaling",
         "tie_embeddings")  # fmt: skip


@dataclass(frozen=True, slots=True)
class About:
    """What was measured, and how; measurements of one folder share it. `shape` is `shape_of` the architecture; `ranks`
    of `threads` CPU threads computed at the same time, `tp` of them a stage of `num_layers` layers. `layers`: of each
    stage of the pipeline."""

    model: str
    shape: dict[str, Any]
    dtype: str
    attention: str
    hardware: str
    device: str
    tp: int
    ranks: int
    threads: int
    num_layers: int
    layers: list[int]
    block_size: int


class OperatorSample(NamedTuple):
    """One micro-batch on one of the stages that measured; seconds of what `OPERATORS` names, of a layer or of the
    stage."""

    stage: int
    point: Point
    seconds: dict[str, float]

    def times(self, factor: float) -> OperatorSample:
        """The same, slower by a factor."""
        return self._replace(seconds={name: seconds * factor for name, seconds in self.seconds.items()})


class StageSample(NamedTuple):
    """One micro-batch on one stage of the real pipeline, `in_flight` of them at once; seconds.

    `wait` is from when what it needed was done (`bound`: the stage before or the coordinator's dispatch, `input`, or
    this stage's own micro-batch before, `stage`) to the begin of its compute. `result` is from the last stage's end
    to when the coordinator has it, None on the others.
    """

    in_flight: int
    point: Point
    stage: int
    compute: float
    wait: float
    bound: str
    result: float | None


def shape_of(arch: Architecture) -> dict[str, Any]:
    """What of an architecture a layer's, the embedding's and the head's times hang on."""
    return {key: value for key, value in asdict(arch).items() if key not in _FREE}


class ProfileFolder:
    """A profile on disk. What is measured is written as it comes, so that a later session goes on from there."""

    def __init__(self, path: Path, key: str = "") -> None:
        self.path = path
        self._key = key or str(path)  # for errors

    @property
    def exists(self) -> bool:
        return (self.path / _ABOUT).exists()

    @property
    def changed(self) -> int:
        """Another number whenever a measurement was added: bytes of the files."""
        files = (self.path / name for name in (_OPERATORS, _STAGES))
        return sum(file.stat().st_size for file in files if file.exists())

    def begin(self, about: About, versions: Mapping[str, str], device_name: str | None = None) -> None:
        """Note what is measured (`device_name`: the GPU's), or check that it is what has been measured there.

        Raises:
            ConfigError: the folder holds measurements of another setting.
        """
        if self.exists:
            was, now = asdict(self.about()), asdict(about)
            for key, value in now.items():
                if was[key] != value and key != "shape":
                    raise ConfigError(_differs(self._key, key, was[key], value))
                for part in value if key == "shape" else ():
                    if was[key].get(part) != value[part]:
                        raise ConfigError(_differs(self._key, part, was[key].get(part), value[part]))
            return
        self.path.mkdir(parents=True, exist_ok=True)
        told = {
            "format": _FORMAT,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine() | ({"gpu": device_name} if device_name else {}),
            "versions": dict(versions),
            "measured": asdict(about),
        }
        (self.path / _ABOUT).write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")

    def about(self) -> About:
        """What was measured.

        Raises:
            ConfigError: no profile, a damaged one, or one of another format.
        """
        try:
            told = yaml.safe_load((self.path / _ABOUT).read_text(encoding="utf-8"))
            if told["format"] != _FORMAT:
                raise ConfigError(f"{self._key}: a profile of format {told['format']}, not {_FORMAT}; measure it again")
            return About(**told["measured"])
        except FileNotFoundError:
            raise ConfigError(f"{self._key}: no profile there ({_ABOUT}); gapless profile makes one") from None
        except (OSError, yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._key}: {_ABOUT} is damaged ({' '.join(str(error).split())})") from None

    def operators(self) -> list[OperatorSample]:
        """Of operators, in the order in which they were measured.

        Raises:
            ConfigError: a damaged file.
        """

        def parse(row: dict[str, str]) -> OperatorSample:
            seconds = {name: float(row[f"{name}_ms"]) / 1e3 for name in OPERATORS}
            return OperatorSample(int(row["stage"]), _point(row), seconds)

        return self._parse(_OPERATORS, parse)

    def stages(self) -> list[StageSample]:
        """Of whole stages; none where the pipeline was not timed.

        Raises:
            ConfigError: a damaged file.
        """

        def parse(row: dict[str, str]) -> StageSample:
            result = float(row["result_ms"]) / 1e3 if row["result_ms"] else None
            compute, wait = float(row["compute_ms"]) / 1e3, float(row["wait_ms"]) / 1e3
            in_flight, stage = int(row["in_flight"]), int(row["stage"])
            return StageSample(in_flight, _point(row), stage, compute, wait, row["bound"], result)

        return self._parse(_STAGES, parse)

    def add_operators(self, samples: Iterable[OperatorSample]) -> None:
        """Append to the file."""
        columns = ("stage", *Point._fields, *(f"{name}_ms" for name in OPERATORS))
        rows = [(s.stage, *s.point, *(_ms(s.seconds[name]) for name in OPERATORS)) for s in samples]
        self._append(_OPERATORS, columns, rows)

    def add_stages(self, samples: Iterable[StageSample]) -> None:
        """Append to the file."""
        columns = ("in_flight", *Point._fields, "stage", "compute_ms", "wait_ms", "bound", "result_ms")
        rows = [
            (s.in_flight, *s.point, s.stage, _ms(s.compute), _ms(s.wait), s.bound,
             "" if s.result is None else _ms(s.result))
            for s in samples
        ]  # fmt: skip
        self._append(_STAGES, columns, rows)

    def _append(self, name: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
        path = self.path / name
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(columns)
            writer.writerows(rows)

    def _parse(self, name: str, parse: Callable[[dict[str, str]], T]) -> list[T]:
        path = self.path / name
        if not path.exists():
            return []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                return [parse(row) for row in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise ConfigError(f"{self._key}: {name} is damaged ({type(error).__name__}: {error})") from None


def machine() -> dict[str, Any]:
    """What kind of machine this is; nothing that names one."""
    return {"cpu": _cpu_model(), "cores": os.cpu_count() or 1, "system": f"{platform.system()} {platform.machine()}"}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _differs(folder: str, key: str, was: object, now: object) -> str:
    return f"{folder}: holds measurements with {key}={was}, not {now}; hydra.run.dir=FOLDER names another folder"


def _point(row: dict[str, str]) -> Point:
    return Point(*(int(row[name]) for name in Point._fields))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6f}"
