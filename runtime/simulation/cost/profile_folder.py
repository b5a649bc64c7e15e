"""A profile on disk: `profile.yaml` describes what was measured, and two CSV files hold the measurements."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from ....conf.architecture import Architecture
from ....conf.errors import ConfigError
from .profile_point import Point

T = TypeVar("T")

OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others", "embedding", "step", "head", "total")
_ABOUT_FILE, _OPERATORS_FILE, _STAGES_FILE = "profile.yaml", "operators.csv", "stages.csv"
_FORMAT = 1
# Fields of an architecture that do not affect a layer's time.
_TIMELESS_FIELDS = (
    *("num_layers", "max_position", "bos_token_id", "eos_token_ids", "norm_eps", "tie_embeddings", "family"),
    *("rope_theta", "rope_scaling", "rotary_dim"),
    *("attention_scale", "embedding_scale", "residual_scale", "logit_scale"),
)
# Fields that a profile has only if they differ from their defaults.
_RARE_FIELDS = ("norms", "qk_norm_over", "attention_softcap", "attention_sinks", "logit_softcap")


@dataclass(frozen=True, slots=True)
class About:
    """What was measured and how. All measurements of a folder share it."""

    model: str
    shape: dict[str, Any]  # `shape_of` the architecture
    dtype: str
    attention: str
    hardware: str
    device: str
    tp: int  # ranks of a stage
    ranks: int  # measured operators concurrently
    threads: int  # CPU threads of a rank
    num_layers: int  # per stage, in the measurement of operators
    layers: list[int]  # number of layers of each pipeline stage
    block_size: int
    nodes: int = 1  # per stage
    quantization: str | None = None  # of weights
    cache_dtype: str = "auto"


class OperatorSample(NamedTuple):
    """The measurement of one micro-batch's operators on one stage.

    `seconds` has a time for each name in `OPERATORS`. Times of layer operators are means over the layers.
    """

    stage: int
    point: Point
    seconds: dict[str, float]


class StageSample(NamedTuple):
    """The measurement of one micro-batch on one stage of the real pipeline. Times are in seconds."""

    in_flight: int  # micro-batches in the pipeline at once
    point: Point
    stage: int
    compute: float
    wait: float  # from when both the input and the stage were available to the start of compute
    bound: str  # which of the two came last: `input` (from the previous stage or the coordinator) or `stage`
    result: float | None  # from the end of the last stage until the coordinator has the result; None on other stages


def shape_of(arch: Architecture) -> dict[str, Any]:
    """Return the fields of `arch` that affect the times of a layer, the embedding and the LM head."""
    plain = {field.name: field.default for field in fields(arch) if field.name in _RARE_FIELDS}
    shape = {key: value for key, value in asdict(arch).items() if key not in _TIMELESS_FIELDS}
    if shape.pop("layers"):
        shape["windows"] = [[kind.window, count] for kind, count in arch.kinds.items()]
    return {key: value for key, value in shape.items() if key not in plain or value != plain[key]}


class ProfileFolder:
    """Reads and writes the folder of a profile. Each measurement is written at once, so that a profile can be resumed.

    Args:
        key: name of the folder in errors; its path by default.
    """

    def __init__(self, path: Path, key: str = "") -> None:
        self.path = path
        self._key = key or str(path)

    @property
    def exists(self) -> bool:
        """Whether the folder has a profile, finished or not."""
        return (self.path / _ABOUT_FILE).exists()

    @property
    def num_bytes(self) -> int:
        """Total size of the measurements in bytes; it grows with each one."""
        files = (self.path / name for name in (_OPERATORS_FILE, _STAGES_FILE))
        return sum(file.stat().st_size for file in files if file.exists())

    def begin(self, about: About, versions: Mapping[str, str], device_name: str | None = None) -> None:
        """Write `profile.yaml`; if it exists, check that it describes the same measurements.

        Args:
            about: what is measured.
            versions: package versions, by name.
            device_name: name of the GPU.

        Raises:
            ConfigError: the folder has measurements of another setting.
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
        content = {
            "format": _FORMAT,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine() | ({"gpu": device_name} if device_name else {}),
            "versions": dict(versions),
            "measured": asdict(about),
        }
        (self.path / _ABOUT_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def about(self) -> About:
        """Read what was measured and how.

        Raises:
            ConfigError: no profile, a damaged one, or one of another format.
        """
        try:
            content = yaml.safe_load((self.path / _ABOUT_FILE).read_text(encoding="utf-8-sig"))
            if (found := content["format"]) != _FORMAT:
                raise ConfigError(f"{self._key}: has profile format {found}, not {_FORMAT}; measure it again")
            return About(**content["measured"])
        except FileNotFoundError:
            raise ConfigError(
                f"{self._key}: contains no profile ({_ABOUT_FILE}); create one with gapless profile"
            ) from None
        except (OSError, yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._key}: {_ABOUT_FILE} is damaged ({' '.join(str(error).split())})") from None

    def operators(self) -> list[OperatorSample]:
        """Read the measurements of operators, in the order in which they were made.

        Raises:
            ConfigError: a damaged file.
        """

        def parse(row: dict[str, str]) -> OperatorSample:
            seconds = {name: float(row[f"{name}_ms"]) / 1e3 for name in OPERATORS}
            return OperatorSample(int(row["stage"]), _point(row), seconds)

        return self._parse(_OPERATORS_FILE, parse)

    def stages(self) -> list[StageSample]:
        """Read the measurements of whole stages. Empty if the pipeline was not measured.

        Raises:
            ConfigError: a damaged file.
        """

        def parse(row: dict[str, str]) -> StageSample:
            result = float(row["result_ms"]) / 1e3 if row["result_ms"] else None
            compute, wait = float(row["compute_ms"]) / 1e3, float(row["wait_ms"]) / 1e3
            in_flight, stage = int(row["in_flight"]), int(row["stage"])
            return StageSample(in_flight, _point(row), stage, compute, wait, row["bound"], result)

        return self._parse(_STAGES_FILE, parse)

    def add_operators(self, samples: Iterable[OperatorSample]) -> None:
        """Append measurements of operators to their file."""
        columns = ("stage", *Point._fields, *(f"{name}_ms" for name in OPERATORS))
        rows = [(s.stage, *s.point, *(_ms(s.seconds[name]) for name in OPERATORS)) for s in samples]
        self._append(_OPERATORS_FILE, columns, rows)

    def add_stages(self, samples: Iterable[StageSample]) -> None:
        """Append measurements of whole stages to their file."""
        columns = ("in_flight", *Point._fields, "stage", "compute_ms", "wait_ms", "bound", "result_ms")
        rows = [
            (
                s.in_flight,
                *s.point,
                s.stage,
                _ms(s.compute),
                _ms(s.wait),
                s.bound,
                "" if s.result is None else _ms(s.result),
            )
            for s in samples
        ]
        self._append(_STAGES_FILE, columns, rows)

    def _append(self, name: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
        path, text = self.path / name, io.StringIO()
        size = path.stat().st_size if path.exists() else 0
        csv.writer(text).writerows([*([] if size else [columns]), *rows])
        try:
            with path.open("ab") as file:
                file.write(text.getvalue().encode())
        except OSError as error:  # remove a partial row, so that a later run can resume
            os.truncate(path, size)
            raise OSError(error.errno, error.strerror, str(path)) from error

    def _parse(self, name: str, parse: Callable[[dict[str, str]], T]) -> list[T]:
        path = self.path / name
        if not path.exists():
            return []
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                return [parse(row) for row in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise ConfigError(f"{self._key}: {name} is damaged ({type(error).__name__}: {error})") from None


def machine() -> dict[str, Any]:
    """Describe this machine's CPU and system, without its hostname."""
    return {"cpu": _cpu_model(), "cores": os.cpu_count() or 1, "system": f"{platform.system()} {platform.machine()}"}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _differs(folder: str, key: str, was: object, now: object) -> str:
    return (
        f"{folder}: contains measurements with {key}={was}, not {now}; choose another folder with hydra.run.dir=FOLDER"
    )


def _point(row: dict[str, str]) -> Point:
    return Point(*(int(row[name]) for name in Point._fields))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.6f}"
