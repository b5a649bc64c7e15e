"""A profile folder of constants that were fitted to published tables: `constants.yaml`, as `conf/hardware` has them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import yaml

from ...conf.build import build, to_mapping
from ...conf.costs import CostsConfig
from ...conf.errors import ConfigError
from ...conf.schema import HardwareConfig
from ...conf.units import with_present_names
from ...conf.user_path import user_path

_FILE = "constants.yaml"


def write_imported(folder: Path, hardware: HardwareConfig, source: str) -> None:
    """Write the constants of a device; `source` names the tables."""
    assert hardware.costs is not None
    folder.mkdir(parents=True, exist_ok=True)
    content = {"hardware": hardware.name, "costs": rounded(hardware.costs)}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
    (folder / _FILE).write_text(f"# Fitted to tables: {source}\n{text}", encoding="utf-8")


def rounded(costs: CostsConfig) -> object:
    """Return the constants as plain data, in four digits, without those that are not known."""

    def short(value: object) -> object:
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items() if each is not None}
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return short(to_mapping(costs))


def imported_costs(profile: str | None, hardware: HardwareConfig) -> CostsConfig | None:
    """Return the constants of a profile folder that holds a device's; None: it holds none.

    Raises:
        ConfigError: they are of another device, or damaged.
    """
    if profile is None:
        return None
    path = user_path(profile, "simulation.profile") / _FILE
    if not path.is_file():
        return None
    name, costs = _read(path, f"simulation.profile={profile}", path.stat().st_mtime_ns)
    if name != hardware.name:
        raise ConfigError(f"simulation.profile={profile}: constants of hardware={name}, not {hardware.name}")
    return costs


@lru_cache(maxsize=4)
def _read(path: Path, key: str, changed: int) -> tuple[str, CostsConfig]:
    """Read the file; `changed` is when it was written, so that a new one is read again."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        return str(content["hardware"]), build(CostsConfig, with_present_names(content["costs"]), "costs")
    except (OSError, yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {_FILE} is damaged ({' '.join(str(error).split())})") from None
