"""Builds the schema's dataclasses from plain mappings: strictly, with each error one line that names the dotted key.

`build` serves the command line (whose mapping hydra composed) and `compose_engine` the Python API, which reads the
same YAML groups without hydra; the same choices give the same config.
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
from .schema import NAMED_WEIGHTS, EngineConfig, HardwareConfig, is_hub_name
from .units import renamed
from .user_path import user_path
from .workloads import WORKLOAD_CONFIGS, WorkloadConfig

C = TypeVar("C")
E = TypeVar("E", bound=EngineConfig)

# Config groups and what they mean. A command has those of its defaults.
GROUPS = {
    "model": "which model; also a path: model=PATH takes a Hugging Face folder or a GGUF file",
    "hardware": "what a rank runs on",
    "cluster": "how ranks lie on nodes and racks, and the links between them",
    "parallel": "the rank grid: any of tpN, ppM and tpN_ppM; local is one rank",
    "scheduler": "the policy that forms micro-batches; also a file with one of your own: scheduler=./FILE.py",
    "workload": "which requests come, and when",
    "engine": "whose defaults a simulation takes: policy, budget, split, cache; keys that are given hold over them",
}
_FAMILIES: dict[type, tuple[str, Mapping[str, type]]] = {  # configs whose `name` picks their class
    SchedulerConfig: ("policy", POLICY_CONFIGS),
    WorkloadConfig: ("workload", WORKLOAD_CONFIGS),
}
_SCALARS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}
_MAY_BE_INFINITE = ("workload.request_rate", "workload.burstiness")
_WITHOUT_FILES: dict[str, Mapping[str, Any]] = {  # groups, with their choices; any other grid of ranks is one too
    "scheduler": POLICY_CONFIGS,
    "workload": WORKLOAD_CONFIGS,
    "parallel": dict.fromkeys(["local", "pp2", "tp2", "tp2_pp2", "tp4", "tp4_pp2", "tp8", "tp8_pp2", "tp8_pp8"]),
}
_GRID = re.compile(r"(?=.)(?:tp([1-9]\d{0,5}))?(?:(?:^|_)pp([1-9]\d{0,5}))?")
_LARGEST_INTEGER = (1 << 31) - 1  # of a count or a size; seeds have bounds of their own
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a tenth of the time


def build(cls: type[C], mapping: Mapping[str, Any], key: str = "") -> C:
    """Build an instance of the dataclass `cls` from a plain `mapping`, checked all the way down.

    Strings are never parsed (`"5"` is no integer) and a bool is no integer; an integer serves as a number, and a bare
    value as a list of one. A `SchedulerConfig` or `WorkloadConfig` becomes the class that its `name` says, a policy of
    the user's own that of its `file`.

    Args:
        cls: of the result.
        mapping: its fields by name; those with a default may be missing.
        key: the dotted key of `mapping` itself, for errors.

    Raises:
        ConfigError: an unknown key, a missing one, a wrong type or a value out of its range.
    """
    if cls in _FAMILIES:
        cls = typing.cast(type[C], member(cls, mapping, key))
    hints = fields(typing.cast(type, cls))
    for name in mapping:
        if name not in hints:
            for base, (word, _) in _FAMILIES.items():
                if issubclass(cls, base) and (having := members_with(base, name)):
                    what = f"{word} {mapping.get('name', cls.__name__)}"
                    raise ConfigError(f"{_join(key, name)}: unknown key of {what}; {having_it(having)}")
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
    """Return the plain form of a config, which `build` takes and which JSON and YAML can hold."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return typing.cast(dict[str, Any], plain(dataclasses.asdict(config)))


@cache
def fields(cls: type) -> Mapping[str, Any]:
    """Return the keys of a dataclass of the schema, with their resolved types."""
    hints = typing.get_type_hints(cls)
    return {key_of(field.name): hints[field.name] for field in dataclasses.fields(cls)}


def key_of(field: str) -> str:
    """Return the key of a field: `import_` is `import`, which is no name in Python."""
    return field.removesuffix("_")


def leaf_fields(cls: type, key: str = "") -> Iterator[tuple[str, Any, type]]:
    """Yield each leaf of `cls` as (dotted key, type, the dataclass that holds it).

    `scheduler` yields the keys of one policy after the other, `workload` those of one workload after the other.
    """
    for owner in _FAMILIES[cls][1].values() if cls in _FAMILIES else (cls,):
        for name, hint in fields(owner).items():
            nested = next((h for h in _options(hint) if dataclasses.is_dataclass(h)), None)
            if nested is not None:
                yield from leaf_fields(typing.cast(type, nested), _join(key, name))
            else:
                yield _join(key, name), str if name == "name" else hint, owner


def dotted_keys(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield every leaf under `cls` as (dotted key, type), each key once."""
    types_by_key: dict[str, Any] = {}
    for key, hint, _ in leaf_fields(cls):
        types_by_key.setdefault(key, hint)
    yield from types_by_key.items()


def families(cls: type) -> dict[str, type]:
    """Return which of `scheduler` and `workload` are fields of `cls`, each with the base class of its choices."""
    return {name: hint for name, hint in fields(cls).items() if hint in _FAMILIES}


def members_with(base: type, key: str, own: Mapping[str, type] | None = None) -> list[str]:
    """Return the names of the policies (`SchedulerConfig`) or workloads (`WorkloadConfig`) that have `key`.

    The user's `own` are among them.
    """
    return [name for name, cls in (dict(_FAMILIES[base][1]) | dict(own or {})).items() if key in fields(cls)]


def having_it(names: Iterable[str]) -> str:
    """Write who has a key: `sarathi has it`, `sarathi, equal_time have it`."""
    listed = list(names)
    return f"{', '.join(listed)} {'has' if len(listed) == 1 else 'have'} it"


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted key."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of the schema in plain form, without those of the policy or the workload that is chosen.

    The YAML of a command or of a choice says only what differs from these.
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
    """Write a plain value as the command line takes it; the mapping of a policy is written by its name."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return str(value["name"])
    return f"[{','.join(map(value_text, value))}]" if isinstance(value, list | tuple) else str(value)


def group_names(group: str) -> list[str]:
    """Return the choices of a config group, sorted: the names of its YAML files.

    Policies, workloads and rank grids have no files; of these, some are named.
    """
    if group in _WITHOUT_FILES:
        return sorted(_WITHOUT_FILES[group])
    files = resources.files(__package__).joinpath(group).iterdir()
    return sorted(entry.name[:-5] for entry in files if entry.name.endswith(".yaml"))


def load_group(group: str, name: str, key: str | None = None) -> dict[str, Any]:
    """Load a choice of a group: of `conf/<group>/<name>.yaml`, a policy's or workload's defaults, or a grid's ranks.

    Raises:
        ConfigError: no such choice, naming `key` or the group.
    """
    if group == "parallel" and (grid := grid_of(name)) is not None:
        return grid
    if name not in (names := group_names(group)):
        raise ConfigError(f"{key or group}={name}: unknown{nearest(name, names)}")
    if (members := _WITHOUT_FILES.get(group)) is not None:
        return {"name": name} | defaults(members[name])
    return typing.cast(dict[str, Any], read_yaml(f"{group}/{name}"))


def grid_of(name: str) -> dict[str, int] | None:
    """Return the ranks that `local`, `tpN`, `ppM` or `tpN_ppM` names; None for any other name."""
    match = _GRID.fullmatch("tp1" if name == "local" else name)
    return match and {"tp": int(match[1] or 1), "pp": int(match[2] or 1)}


def load_command(command: str) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Load the keys of `conf/<command>.yaml`, and the command's groups with their default choices; None: of none."""
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
    """Load the hardware of that name.

    Raises:
        ConfigError: no such choice, naming `key`.
    """
    return build(HardwareConfig, load_group("hardware", name, key), "hardware")


def read_yaml(name: str) -> Any:
    """Read `conf/<name>.yaml`; without such a file, return an empty mapping."""
    file = resources.files(__package__).joinpath(f"{name}.yaml")
    return (yaml.load(file.read_text(encoding="utf-8"), _Loader) if file.is_file() else None) or {}


def model_choice(model: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """Resolve `model=...` to a choice of the model group, and the keys that a folder adds to it.

    The name of a choice wins. Otherwise a path (it is a folder, has a separator, starts with `.` or `~`, or ends with
    `.gguf`) is a Hugging Face folder or a GGUF file: the choice `folder` with `weights` and `name`. `ORGANISATION/NAME`
    is a name on the hub if there is no such path.
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
    """Make the model's folders absolute, since ranks need not share our working directory, and check that they exist.

    Raises:
        ConfigError: no such folder.
    """
    model = config.model
    found: dict[str, Any] = {}
    if model.weights not in NAMED_WEIGHTS and not is_hub_name(model.weights):
        weights = user_path(model.weights, "model.weights").absolute()
        if not weights.is_dir() and not (weights.suffix == ".gguf" and weights.is_file()):
            what = "is a file; give the folder that holds it" if weights.exists() else "no such folder"
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
    """Compose the config of an engine from group choices and dotted overrides, as the command line does.

    Args:
        model: a choice of the model group, a Hugging Face folder or a GGUF file.
        pp: number of stages.
        tp: ranks of a stage.
        scheduler: a choice of the scheduler group, or a file with a policy of your own.
        launcher: None takes `local` for one rank and `ray` for more.
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
    """Write the hint for a dotted key that `cls` lacks: `; did you mean ...?` if a last name is near, else all keys."""
    keys = [k for k, _ in dotted_keys(cls)]
    if hint := renamed(key := key.replace("-", "_"), keys):
        return hint
    parent, _, leaf = key.rpartition(".")
    near = [k for k in keys if did_you_mean(leaf, [k.rpartition(".")[2]], 0.5)]  # else a long parent makes keys alike
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
    """Find the class of the policy or the workload that the mapping at `key` describes.

    Raises:
        ConfigError: the mapping has no `name` or an unknown one, or a `file` that holds no policy.
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
        ConfigError: what holds it is no mapping, or not a key of `cls`.
    """
    *parents, leaf = key.split(".")
    node = mapping
    for depth, name in enumerate(parents, 1):
        if node.get(name) is None:
            if depth == 1 and name not in fields(cls):
                raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")
            node[name] = {}
        if not isinstance(node[name], dict):
            raise ConfigError(f"{key}: unknown key; {'.'.join(parents[:depth])} holds a value, not keys")
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
    """Convert `value` to the type `hint`; None where it is of another type.

    Raises:
        ConfigError: what it holds is wrong; a number that is not finite or too large; a text that is not Unicode.
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
        raise ConfigError(f"{key}={value!r}: must be text in UTF-8")
    return value if isinstance(value, hint) else None


def is_unicode(text: str) -> bool:
    """Return whether `text` can be written as UTF-8: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bounded(value: int, key: str) -> int:
    is_seed = key.rpartition(".")[2] == "seed"
    if abs(value) > _LARGEST_INTEGER and not (is_seed and value.bit_length() < 128):
        shown = str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
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
    """Write a type of the schema in words: `an integer`, `null or a string`, `cpu or cuda`."""
    return _right(_options(hint), None)


def _right(options: tuple[Any, ...], value: Any) -> str:
    words = ["null"] if type(None) in options else []
    valid: tuple[str, ...] = ()
    for option in options:
        if dataclasses.is_dataclass(option):
            words.append("a mapping of keys")
        elif typing.get_origin(option) is tuple:
            (element, *_) = typing.get_args(option)
            is_choice = typing.get_origin(element) is Literal
            words.append(f"a list of {describe(element) if is_choice else _PLURALS.get(element, 'mappings of keys')}")
        elif typing.get_origin(option) is Literal:
            valid = typing.get_args(option)
            words.extend(valid)
        elif typing.get_origin(option) is dict:
            words.append("a mapping")
        elif option is not type(None):
            words.append(_SCALARS[option])
    text = " or ".join(", ".join(words).rsplit(", ", 1))
    return text + (did_you_mean(value, valid) if isinstance(value, str) else "")
