"""Builds config dataclasses from plain mappings, strictly. Every error is one line that names the dotted key.

The command line calls `build` with the mapping that hydra composed. The Python API calls `compose_engine`, which reads
the same YAML groups without hydra. The same choices give the same config.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

import yaml

from .errors import ConfigError, did_you_mean, nearest
from .policies import POLICY_CONFIGS, SchedulerConfig
from .policy_file import is_policy_file, policy_config, policy_mapping
from .ranges import plain_type, resolved_types
from .schema import NAMED_WEIGHTS, EngineConfig, HardwareConfig, is_hub_name
from .units import renamed, renamed_of_policy
from .user_path import user_path
from .workloads import WORKLOAD_CONFIGS, WorkloadConfig

C = TypeVar("C")
E = TypeVar("E", bound=EngineConfig)

# Config groups and their meanings. A command has the groups in its `defaults`.
GROUPS = {
    "model": "the model; model=PATH takes a Hugging Face folder or a GGUF file",
    "hardware": "the device of a rank",
    "cluster": "nodes, racks, and the links between them",
    "parallel": "the rank grid: tpN, ppM or tpN_ppM; local is one rank",
    "scheduler": "the scheduling policy; scheduler=./FILE.py takes your own",
    "workload": "the requests and their arrival times",
    "engine": "defaults of another engine (policy, budget, split, cache); given keys override them",
}
_FAMILIES: dict[type, tuple[str, Mapping[str, type]]] = {  # configs whose `name` selects the class
    SchedulerConfig: ("policy", POLICY_CONFIGS),
    WorkloadConfig: ("workload", WORKLOAD_CONFIGS),
}
_SCALARS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}
_MAY_BE_INFINITE = ("workload.request_rate", "workload.burstiness")
_WITHOUT_FILES: dict[str, Mapping[str, Any]] = {  # groups without YAML files; any rank grid is valid
    "scheduler": POLICY_CONFIGS,
    "workload": WORKLOAD_CONFIGS,
    "parallel": dict.fromkeys(["local", "pp2", "tp2", "tp2_pp2", "tp4", "tp4_pp2", "tp8", "tp8_pp2", "tp8_pp8"]),
}
_GRID = re.compile(r"(?=.)(?:tp([1-9]\d{0,5}))?(?:(?:^|_)pp([1-9]\d{0,5}))?")
_LARGEST_INTEGER = (1 << 31) - 1  # of counts and sizes; seeds have their own bounds
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast


def build(cls: type[C], mapping: Mapping[str, Any], key: str = "") -> C:
    """Build an instance of the dataclass `cls` from a plain `mapping`, validated recursively.

    Strings are not parsed (`"5"` is not an integer) and bools are not integers. An integer is accepted as a number, and
    a single value as a list of one. The class of a `SchedulerConfig` or `WorkloadConfig` is selected by its `name`, or
    by its `file` for a policy file.

    Args:
        cls: class of the result.
        mapping: fields by name; those with a default may be missing.
        key: the dotted key of `mapping` itself, for errors.

    Raises:
        ConfigError: an unknown or missing key, a wrong type or a value out of range.
    """
    if cls in _FAMILIES:
        cls = typing.cast(type[C], member(cls, mapping, key))
    hints = fields(typing.cast(type, cls))
    for name in mapping:
        if name not in hints:
            for base, (word, _) in _FAMILIES.items():
                if issubclass(cls, base) and (having := members_with(base, name)):
                    what = f"{word} {mapping.get('name', cls.__name__)}"
                    hint = renamed_of_policy([mapping.get("name", "")], name) or having_it(having)
                    raise ConfigError(f"{_join(key, name)}: unknown key of {what}; {hint}")
            wrong, valid = _join(key, name), [_join(key, each) for each in hints]
            hint = (renamed(wrong, valid) or nearest(wrong, valid)) if key else unknown_key(cls, name)
            raise ConfigError(f"{wrong}: unknown key{hint}")
    values = {name: _convert(hints[name], value, _join(key, name)) for name, value in mapping.items()}
    names = {key_of(field.name): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"{_join(key, field.name)}: missing; it has no default")
    return cls(**{names[name]: value for name, value in values.items()})


def to_mapping(config: Any) -> dict[str, Any]:
    """Return a config as plain mappings and lists, the inverse of `build`."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return typing.cast(dict[str, Any], plain(dataclasses.asdict(config)))


@cache
def fields(cls: type) -> Mapping[str, Any]:
    """Return the keys of a config dataclass with their resolved types."""
    hints = resolved_types(cls)
    return {key_of(field.name): plain_type(hints[field.name]) for field in dataclasses.fields(cls)}


def key_of(field: str) -> str:
    """Return the key of a field: `import_` is `import`, a reserved word in Python."""
    return field.removesuffix("_")


def leaf_fields(cls: type, key: str = "") -> Iterator[tuple[str, Any, type]]:
    """Yield each leaf of `cls` as (dotted key, type, owning dataclass).

    `scheduler` and `workload` yield the keys of each policy or workload in turn.
    """
    for owner in _FAMILIES[cls][1].values() if cls in _FAMILIES else (cls,):
        for name, hint in fields(owner).items():
            nested = next((h for h in _options(hint) if dataclasses.is_dataclass(h)), None)
            if nested is not None:
                yield from leaf_fields(typing.cast(type, nested), _join(key, name))
            else:
                yield _join(key, name), str if name == "name" else hint, owner


def dotted_keys(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield each leaf key of `cls` once, as (dotted key, type)."""
    types_by_key: dict[str, Any] = {}
    for key, hint, _ in leaf_fields(cls):
        types_by_key.setdefault(key, hint)
    yield from types_by_key.items()


def families(cls: type) -> dict[str, type]:
    """Return the fields `scheduler` and `workload` of `cls`, if present, with the base class of their choices."""
    return {name: hint for name, hint in fields(cls).items() if hint in _FAMILIES}


def members_with(base: type, key: str, own: Mapping[str, type] | None = None) -> list[str]:
    """Return the names of the policies (`SchedulerConfig`) or workloads (`WorkloadConfig`) that have `key`.

    `own` are policies from files, by name.
    """
    return [name for name, cls in (dict(_FAMILIES[base][1]) | dict(own or {})).items() if key in fields(cls)]


def having_it(names: Iterable[str]) -> str:
    """Return who has a key: `sarathi has it`, `sarathi, equal_time have it`."""
    listed = list(names)
    return f"{', '.join(listed)} {'has' if len(listed) == 1 else 'have'} it"


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def defaults(cls: type) -> dict[str, Any]:
    """Return the schema's defaults in plain form, except those of the chosen policy and workload.

    The YAML files of commands and choices contain only what differs.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key, make = key_of(field.name), field.default_factory
        if dataclasses.is_dataclass(hint := fields(cls)[key]) and hint not in _FAMILIES:
            nested = typing.cast(type, hint)
            found[key] = defaults(nested) if make is dataclasses.MISSING else to_mapping(make())
        elif field.default is not dataclasses.MISSING:
            found[key] = list(field.default) if isinstance(field.default, tuple) else field.default
    return found


def value_text(value: Any) -> str:
    """Return a plain value in command-line syntax; the mapping of a policy becomes its name."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return str(value["name"])
    return f"[{','.join(map(value_text, value))}]" if isinstance(value, list | tuple) else str(value)


def group_names(group: str) -> list[str]:
    """Return the sorted choices of a config group.

    Policies, workloads and common rank grids have no YAML files.
    """
    if group in _WITHOUT_FILES:
        return sorted(_WITHOUT_FILES[group])
    files = resources.files(__package__).joinpath(group).iterdir()
    return sorted(entry.name[:-5] for entry in files if entry.name.endswith(".yaml"))


def load_group(group: str, name: str, key: str | None = None) -> dict[str, Any]:
    """Load a choice of a group: `conf/<group>/<name>.yaml`, the defaults of a policy or workload, or a rank grid.

    Raises:
        ConfigError: unknown choice; the message names `key` or the group.
    """
    if group == "parallel" and (grid := grid_of(name)) is not None:
        return grid
    if name not in (names := group_names(group)):
        raise ConfigError(f"{key or group}={name}: unknown{nearest(name, names)}")
    if (members := _WITHOUT_FILES.get(group)) is not None:
        return {"name": name} | defaults(members[name])
    return typing.cast(dict[str, Any], read_yaml(f"{group}/{name}"))


def grid_of(name: str) -> dict[str, int] | None:
    """Parse `local`, `tpN`, `ppM` or `tpN_ppM`; None for any other name."""
    match = _GRID.fullmatch("tp1" if name == "local" else name)
    return match and {"tp": int(match[1] or 1), "pp": int(match[2] or 1)}


def load_command(command: str) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Load the keys of `conf/<command>.yaml` and the command's groups with their default choices (None: no choice)."""
    primary = read_yaml(command)
    choices = {
        group: entry[group]
        for entry in primary.get("defaults", ())
        if isinstance(entry, dict)
        for group in GROUPS
        if group in entry
    }
    return {key: value for key, value in primary.items() if key not in ("defaults", "hydra")}, choices


def load_hardware(name: str, key: str = "hardware") -> HardwareConfig:
    """Load a hardware config by name.

    Raises:
        ConfigError: unknown choice; the message names `key`.
    """
    return build(HardwareConfig, load_group("hardware", name, key), "hardware")


def read_yaml(name: str) -> Any:
    """Read `conf/<name>.yaml`; an empty mapping if there is no such file."""
    file = resources.files(__package__).joinpath(f"{name}.yaml")
    return (yaml.load(file.read_text(encoding="utf-8"), _Loader) if file.is_file() else None) or {}


def model_choice(model: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """Resolve `model=...` to a choice of the model group and further keys.

    Names of choices take precedence. A path (an existing folder, or text with a separator, that starts with `.` or `~`,
    or that ends with `.gguf`) is a Hugging Face folder or GGUF file: the choice `folder` with `weights` and `name`.
    `ORGANISATION/NAME` is a Hub name if there is no such path.
    """
    text = os.fspath(model)
    if isinstance(model, str) and text in group_names("model") and text != "folder":
        return text, {}
    is_path = not isinstance(model, str) or os.sep in text or text.startswith((".", "~")) or os.path.isdir(text)
    if not is_path and not text.endswith(".gguf"):
        return text, {}
    if isinstance(model, str) and is_hub_name(text):
        return "folder", {"weights": text, "name": text.rpartition("/")[2]}
    folder = user_path(text, "model").absolute()
    return "folder", {"weights": str(folder), "name": folder.resolve().name or "folder"}


def locate(config: E) -> E:
    """Check that the model's folders exist and make them absolute, since ranks may have other working directories.

    Raises:
        ConfigError: no such folder.
    """
    model = config.model
    found: dict[str, Any] = {}
    if model.weights not in NAMED_WEIGHTS and not is_hub_name(model.weights):
        weights = user_path(model.weights, "model.weights").absolute()
        if not weights.is_dir() and not (weights.suffix == ".gguf" and weights.is_file()):
            what = "is a file; give its folder" if weights.exists() else "no such folder"
            hint = did_you_mean(model.weights, NAMED_WEIGHTS)
            raise ConfigError(f"model.weights={model.weights}: {what}{hint}")
        found["weights"] = str(weights)
    for name, word in (("tokenizer", "none"), ("generation_config", "auto")):
        if (given := getattr(model, name)) in (None, word):
            continue
        path = user_path(given, f"model.{name}").absolute()
        if not path.exists():
            raise ConfigError(f"model.{name}={given}: no such folder or {name}.json")
        found[name] = str(path)
    return dataclasses.replace(config, model=dataclasses.replace(model, **found)) if found else config


def compose_engine(
    *,
    model: str | os.PathLike[str],
    pp: int = 1,
    tp: int = 1,
    scheduler: str = "equal_time",
    launcher: str | None = None,
    hardware: str = "cpu",
    overrides: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Compose an engine config from group choices and dotted overrides, like the command line.

    Args:
        model: a choice of the model group, a Hugging Face folder or a GGUF file.
        pp: number of stages.
        tp: tensor-parallel ranks per stage.
        scheduler: a choice of the scheduler group, or a policy file.
        launcher: None: `local` for one rank, else `ray`.
        hardware: a choice of the hardware group.
        overrides: plain Python values by dotted key (`{"scheduler.chunk": 48}`).

    Raises:
        ConfigError: an unknown choice or key, a wrong type or value, a missing folder.
    """
    choice, extra = model_choice(model)
    mapping: dict[str, Any] = {
        "model": load_group("model", choice) | extra,
        "hardware": load_group("hardware", hardware),
        "parallel": {"pp": pp, "tp": tp, "launcher": launcher},
        "scheduler": policy_mapping(scheduler) if is_policy_file(scheduler) else load_group("scheduler", scheduler),
    }
    for key, value in (overrides or {}).items():
        assign(mapping, key, value)
    return locate(build(EngineConfig, mapping))


def unknown_key(cls: type, key: str) -> str:
    """Return the hint for an unknown key: `; did you mean ...?` if a leaf name is close, else the valid keys."""
    keys = [k for k, _ in dotted_keys(cls)]
    if hint := renamed(key := key.replace("-", "_"), keys):
        return hint
    parent, _, leaf = key.rpartition(".")
    near = [k for k in keys if did_you_mean(leaf, [k.rpartition(".")[2]], 0.5)]  # not by a long common parent
    siblings = [k for k in keys if parent and k.startswith(f"{parent}.")]
    for candidates, cutoff in (
        ([k for k in near if k.rpartition(".")[2] == leaf], 0.0),
        (near, 0.75),
        ([k for k in siblings if k in near], 0.5),
        ([] if siblings else list(fields(cls)), 0.5),
    ):
        if hint := did_you_mean(key, candidates, cutoff):
            return hint
    return f"; valid: {', '.join(sorted(siblings or fields(cls)))}"


def member(base: type, mapping: Mapping[str, Any], key: str) -> type:
    """Return the class of the policy or workload in the mapping at `key`.

    Raises:
        ConfigError: `name` is missing or unknown, or `file` has no policy.
    """
    if base is SchedulerConfig and isinstance(mapping.get("file"), str):
        return policy_config(mapping["file"])
    name, members = mapping.get("name"), _FAMILIES[base][1]
    if name is None:
        raise ConfigError(f"{_join(key, 'name')}: missing; valid: {', '.join(sorted(members))}")
    if not isinstance(name, str) or name not in members:
        raise ConfigError(f"{_join(key, 'name')}={name!r}: unknown{nearest(str(name), members)}")
    return members[name]


def assign(mapping: dict[str, Any], key: str, value: Any, cls: type = EngineConfig) -> None:
    """Set a dotted `key` of a plain mapping of `cls`.

    Raises:
        ConfigError: its parent is not a mapping, or not a key of `cls`.
    """
    *parents, leaf = key.split(".")
    node = mapping
    for depth, name in enumerate(parents, 1):
        if node.get(name) is None:
            if depth == 1 and name not in fields(cls):
                raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")
            node[name] = {}
        if not isinstance(node[name], dict):
            raise ConfigError(f"{key}: unknown key; {'.'.join(parents[:depth])} has a value, not keys")
        node = node[name]
    node[leaf] = value


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _convert(hint: Any, value: Any, key: str) -> Any:
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    for option in options if value is not None else ():
        if (converted := _of_type(option, value, key)) is not None:
            return converted
    raise ConfigError(f"{key}={value!r}: must be {_right(options, value)}")


def _of_type(hint: Any, value: Any, key: str) -> Any:
    """Convert `value` to the type `hint`; None if it has another type.

    Raises:
        ConfigError: an invalid nested value; a number that is not finite or too large; a string that is not Unicode.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        built = build(typing.cast(type, hint), value, key) if isinstance(value, Mapping) else value
        return built if isinstance(built, typing.cast(type, hint)) else None
    if origin is Literal:
        return value if any(value == valid and type(value) is type(valid) for valid in arguments) else None
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else None
    if origin is tuple:
        items, element = value if isinstance(value, list | tuple) else [value], arguments[0]
        if element in _SCALARS:
            found = [_of_type(element, item, key) for item in items]
            return None if None in found else tuple(found)
        where = f"{key}[{{}}]" if dataclasses.is_dataclass(element) else key
        return tuple(_convert(element, item, where.format(index)) for index, item in enumerate(items))
    if hint is bool or isinstance(value, bool):
        return value if hint is bool and isinstance(value, bool) else None
    if hint is int:
        return _bounded(int(value), key) if isinstance(value, numbers.Integral) else None
    if hint is float:
        return _finite(value, key) if isinstance(value, numbers.Real) else None
    if isinstance(value, str) and not is_unicode(value):
        raise ConfigError(f"{key}={value!r}: must be valid UTF-8 text")
    return value if isinstance(value, hint) else None


def is_unicode(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8, without lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bounded(value: int, key: str) -> int:
    is_seed = key.rpartition(".")[2] == "seed"
    if abs(value) > _LARGEST_INTEGER and not (is_seed and value.bit_length() < 128):
        shown = str(value) if value.bit_length() < 128 else f"a {value.bit_length()}-bit number"
        raise ConfigError(f"{key}={shown}: must be an integer of at most {_LARGEST_INTEGER}")
    return value


def _finite(value: numbers.Real, key: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(f"{key}: must be a number below {sys.float_info.max:.0e}") from None
    if math.isnan(number) or (math.isinf(number) and key not in _MAY_BE_INFINITE):
        right = "a number" if key in _MAY_BE_INFINITE else "a finite number"
        raise ConfigError(f"{key}={number}: must be {right}")
    return number


def describe(hint: Any) -> str:
    """Return a type in words: `an integer`, `null or a string`, `cpu or cuda`."""
    return _right(_options(hint), None)


def _right(options: tuple[Any, ...], value: Any) -> str:
    words: list[str] = ["null"] if type(None) in options else []
    valid: list[str] = []
    for option in options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin is tuple:
            is_choice = typing.get_origin(arguments[0]) is Literal
            plural = describe(arguments[0]) if is_choice else _PLURALS.get(arguments[0], "mappings of keys")
            words.append(f"a list of {plural}")
        elif origin is Literal:
            valid += arguments
            words += arguments
        elif option is not type(None):
            words.append("a mapping" if origin is dict else _SCALARS.get(option, "a mapping of keys"))
    text = " or ".join(", ".join(words).rsplit(", ", 1))
    return text + (did_you_mean(value, valid) if isinstance(value, str) else "")
