"""Composes configs from command-line overrides: hydra composes, `conf.build` validates, each error is one line.

Everything is validated before a folder is created: keys against the schema, choices against the YAML files, and each
config of a sweep by building it. Free-text values are quoted for hydra's grammar. With several policies or workloads, a
key applies to those that have it.
"""

from __future__ import annotations

import itertools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import yaml

from ..conf.build import (
    GROUPS,
    assign,
    build,
    defaults,
    describe,
    dotted_keys,
    families,
    fields,
    grid_of,
    group_names,
    having_it,
    leaves,
    load_command,
    load_group,
    locate,
    member,
    members_with,
    model_choice,
    unknown_key,
    value_text,
)
from ..conf.engines import engine_defaults
from ..conf.errors import ConfigError, nearest
from ..conf.policies import SchedulerConfig
from ..conf.policy_file import SUFFIX, is_policy_file, policy_mapping
from ..conf.schema import EngineConfig
from ..conf.units import renamed_of_policy

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

C = TypeVar("C")
Choice = dict[str, Any]  # the keys of a group's choice
E = TypeVar("E", bound=EngineConfig)

CONFIG_MODULE = "gapless.conf"
FREE_TEXT = (
    *("prompt", "prompts", "outputs", "model.weights", "model.tokenizer", "model.name"),
    "model.generation_config",
    *("url", "url_model"),
    *("workload.path", "simulation.profile", "check", "import"),
    *(f"serve.{name}" for name in ("host", "config", "otlp_endpoint", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")),
)
_OR = {"model": " (or a path with a / in it)", "parallel": " (tpN, ppM or tpN_ppM)"}  # further values of a group
EXTRAS = {"hydra/launcher=joblib": "sweep"}  # hydra's choices that need an extra
_OVERRIDE = re.compile(r"(?P<mark>\+{0,2}|~)(?P<key>[^=+~\s][^=\s]*)=(?P<value>.*)", re.DOTALL)
_POLICY_FILE = re.compile(r"[^,()\s'\"]+\.py(?![^,()\s'\"])")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


@dataclass(frozen=True, slots=True)
class ComposedRun(Generic[E]):
    """A composed run: a single run, or one point of a sweep."""

    config: E
    composed: DictConfig  # including the hydra node
    overrides: tuple[str, ...]  # as passed to hydra
    loader: ConfigLoader
    dropped: tuple[str, ...]  # omitted keys that only policies or workloads of other points have


def compose_all(
    overrides: Sequence[str], cls: type[E], command: str, *, multirun: bool = False
) -> list[ComposedRun[E]]:
    """Compose the run of a command line, or each point of its sweep.

    `scheduler=a,b` is a single run if the command has the key `policies`: `scheduler` is the first policy, and
    `policies` has the config of each. With `multirun` it is a sweep.

    Raises:
        ConfigError: the command line is invalid; the message is one line.
    """
    given = _by_key(overrides)
    own = _take_policy_files(given)
    _check_keys(given, cls, command, own)
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    _store(cls, given.get("parallel", ""))
    with _hydra(command) as loader:
        try:
            return _CommandLine(cls, command, given, own, loader, multirun).points()
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(error)) from None


def compose_one(overrides: Sequence[str], cls: type[E], command: str) -> E:
    """Compose a single config from overrides.

    Raises:
        ConfigError: as `compose_all`.
    """
    return compose_all(overrides, cls, command)[0].config


def config_text(overrides: Sequence[str], cls: type[EngineConfig], command: str) -> str:
    """Compose a single config from overrides, and return it as YAML, without hydra's node.

    Raises:
        ConfigError: as `compose_all`.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(_own(compose_all(overrides, cls, command)[0].composed)).rstrip()


def from_arguments(arguments: Sequence[str], cls: type[C], positional: str, others: str | None = None) -> C:
    """Build the config of a command without hydra.

    Positional arguments become the value of the key `positional`. Overrides of keys that `cls` lacks become the value
    of the key `others`, if any.

    Raises:
        ConfigError: an unknown key, or a value that is not YAML or has a wrong type or range.
    """
    words: list[str] = []
    mapping: dict[str, Any] = {positional: words}
    valid = dict(dotted_keys(cls))
    for text in arguments:
        match = _OVERRIDE.fullmatch(text)
        if match is None or os.path.exists(text):
            words.append(text)
        elif (key := match["key"]) in valid:
            assign(mapping, key, _from_yaml(key, match["value"], valid[key]), cls)
        elif others is not None:
            mapping.setdefault(others, []).append(text)
        else:
            raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")
    return build(cls, mapping)


def _from_yaml(key: str, text: str, hint: Any) -> Any:
    """Parse a YAML value. For string keys, `5` remains a string."""
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}={text}: not valid YAML") from None
    takes_text = hint is str or (str in typing.get_args(hint) and not isinstance(parsed, list))
    return text if parsed is not None and (takes_text or isinstance(parsed, str)) else parsed


def quote(text: str) -> str:
    """Quote `text` for hydra's grammar, escaping `${` so that it is not an interpolation."""
    from hydra.core.override_parser.types import Quote, QuotedString

    literal = _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", text)
    return QuotedString(literal, Quote.single).with_quotes()


def to_config(composed: DictConfig, cls: type[E]) -> E:
    """Build and validate the config that hydra composed.

    Raises:
        ConfigError: an unknown key, a wrong type or value, a missing folder, or a failed interpolation.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        mapping = OmegaConf.to_container(_own(composed), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from None
    return locate(build(cls, typing.cast(dict[str, Any], mapping)))


def _own(composed: DictConfig) -> DictConfig:
    """Return a composed config without hydra's node."""
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


@dataclass(frozen=True, slots=True)
class _CommandLine(Generic[E]):
    """Composes configs from the overrides of a command line."""

    cls: type[E]
    command: str
    given: Mapping[str, str]  # value by key; the keys are known
    own: Mapping[str, Choice]  # policies from files, by name
    loader: ConfigLoader
    multirun: bool

    def points(self) -> list[ComposedRun[E]]:
        """Compose each point, one per combination of values.

        Raises:
            ConfigError: an override is invalid or conflicts with others.
        """
        given = dict(self.given)
        takes_policies = "policies" in fields(typing.cast(type, self.cls)) and not (
            self.multirun and "scheduler" in given
        )
        shipped = [policy["name"] for policy in load_command(self.command)[0].get("policies", ())]
        if shipped and not given.keys() & {"scheduler", "policies", "engine"}:
            given["scheduler"] = ",".join(shipped)
        texts = {key: quote(value) if _is_free_text(key, value) else value for key, value in given.items()}
        if "model" in given:
            texts["model"], folder = model_choice(given["model"])
            texts = {f"model.{key}": quote(value) for key, value in folder.items()} | texts
        parsed = {key: self._parse(key, text, takes_policies) for key, text in texts.items()}
        values = {key: _values(override) for key, override in parsed.items()}
        several = {group: values[group] for group in families(self.cls) if len(values.get(group, ())) > 1}
        if takes_policies and "scheduler" in several:  # a single run that compares the policies
            names = several.pop("scheduler")
            policies = self._whole_policies(names, parsed)
            values = {key: each for key, each in values.items() if key in parsed}
            values |= {"scheduler": names[:1], "policies": [policies]}
        elif shipped and "policies" not in given:
            values["policies"] = ["[]"]
        for group, names in several.items():
            for key in _keys_of(values, group):
                self._members_with(group, key, names)  # raises unless one of `names` has the key
        points = (dict(zip(values, point, strict=True)) for point in itertools.product(*values.values()))
        return [self._compose(point, several) for point in points]

    def _parse(self, key: str, text: str, takes_policies: bool) -> Override:
        """Parse an override.

        Raises:
            ConfigError: hydra cannot parse the value, it is a sweep without `-m`, or an unknown choice.
        """
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            (override,) = OverridesParser.create(config_loader=self.loader).parse_overrides([f"{key}={text}"])
            names = _values(override)
        except HydraException as error:
            reason = f"({_one_line(error)}); quote it as KEY='...' inside the shell's quotes"
            raise ConfigError(f"{key}={text}: hydra cannot parse this value {reason}") from None
        if override.is_sweep_override() and not (self.multirun or (takes_policies and key == "scheduler")):
            is_list = "a list" in describe(dict(dotted_keys(self.cls)).get(key, str))
            how = f"for a list write {key}=[{text}]" if is_list else "add -m to run each"
            raise ConfigError(f"{key}={text}: comma-separated values are a sweep; {how}")
        if key.startswith("hydra/") or key in GROUPS:
            valid = group_names(key) if key in GROUPS else self.loader.get_group_options(key)
            if not valid:
                raise ConfigError(f"{key}: unknown hydra group")
            others = (name for name in names if name not in (*valid, *self.own))
            for name in (name for name in others if key != "parallel" or grid_of(name) is None):
                if extra := EXTRAS.get(f"{key}={name}"):
                    raise ConfigError(f"{key}={name}: not installed; run pip install '.[{extra}]' in a checkout")
                raise ConfigError(f"{key}={name}: unknown{nearest(name, valid)}{_OR.get(key, '')}")
        return override

    def _members_with(self, group: str, key: str, names: Sequence[str]) -> list[str]:
        """Return the names of the policies or workloads that have the key.

        Raises:
            ConfigError: others have it, but none of `names`.
        """
        base = families(self.cls)[group]
        own = {name: member(base, choice, group) for name, choice in self.own.items()} if group == "scheduler" else {}
        having = members_with(base, key, own)
        if having and not set(having) & set(names):
            hint = renamed_of_policy(names, key) or having_it(having)
            raise ConfigError(f"{group}.{key}: unknown key of {', '.join(names)}; {hint}")
        return having

    def _whole_policies(self, names: Sequence[str], parsed: dict[str, Override]) -> str:
        """Return the config of each policy, as a list in hydra's grammar.

        Removes the keys that the first policy lacks from `parsed`, since hydra composes `scheduler` from the rest.

        Raises:
            ConfigError: a policy is repeated or invalid, or `policies` or `scheduler.name` is given too.
        """
        if "policies" in parsed:
            raise ConfigError("scheduler and policies are both given; give one of them")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"scheduler={','.join(names)}: {twice[0]} is repeated; repeats=2 runs each policy twice")
        if "scheduler.name" in parsed:
            raise ConfigError("scheduler.name: cannot be set; choose policies by scheduler=NAME,NAME")
        mappings = [self.own.get(name) or load_group("scheduler", name) for name in names]
        for leaf in _keys_of(parsed, "scheduler"):
            key = f"scheduler.{leaf}"
            value = self.given[key] if _is_free_text(key, self.given[key]) else parsed[key].value()
            having = self._members_with("scheduler", leaf, names)
            mappings = [mapping | {leaf: value} if mapping["name"] in having else mapping for mapping in mappings]
            if names[0] not in having:
                del parsed[key]
        for mapping in mappings:
            build(SchedulerConfig, mapping, "scheduler")
        return literal(mappings)

    def _compose(self, point: dict[str, str], swept: Iterable[str]) -> ComposedRun[E]:
        """Compose a point. In `swept` groups, keys that the point's choice lacks are omitted."""
        from hydra import compose
        from omegaconf import OmegaConf

        dropped: list[str] = []
        for group in swept:
            choice = self.own.get(point[group]) or load_group(group, point[group])
            known = fields(member(families(self.cls)[group], choice, group))
            dropped += [f"{group}.{key}" for key in _keys_of(point, group) if key.partition(".")[0] not in known]
        point = {key: text for key, text in point.items() if key not in dropped}
        own, chosen = load_command(self.command)
        engine = point.pop("engine", "null")
        if engine != "null":
            point = self._engine_keys(engine, point, chosen) | point
        choices = {group: point.get(group, name) for group, name in chosen.items()}
        groups = {group: load_group(group, name) for group, name in choices.items() if name in group_names(group)}
        present = {key for part in (defaults(self.cls), own, groups) for key, _ in leaves(part)}
        present |= chosen.keys()  # hydra requires ++ for other keys
        texts = [f"{'' if key in present or '/' in key else '++'}{key}={text}" for key, text in point.items()]
        mode = f"hydra.mode={'MULTIRUN' if self.multirun else 'RUN'}"
        composed = compose(self.command, [*texts, mode], return_hydra_config=True)
        if engine != "null":
            OmegaConf.update(composed, "engine", engine, force_add=True)
        return ComposedRun(to_config(composed, self.cls), composed, tuple(texts), self.loader, tuple(dropped))

    def _engine_keys(self, engine: str, point: Mapping[str, str], chosen: Mapping[str, str | None]) -> dict[str, str]:
        """Return the overrides of an engine; keys of its policy only if the point has that policy."""
        known = {key for key, _ in dotted_keys(self.cls)} | chosen.keys()
        found = engine_defaults(engine, point.get("hardware", chosen.get("hardware")), known)
        is_its_policy = point.get("scheduler", found["scheduler"]) == found["scheduler"]
        if is_its_policy and point.get("policies", "[]") == "[]":
            return found
        return {key: text for key, text in found.items() if not key.startswith("scheduler.")}


@contextmanager
def _hydra(job: str) -> Iterator[ConfigLoader]:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module(CONFIG_MODULE, job, version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the value of each key, without `+` or `++`, which `_compose` adds as hydra requires.

    Raises:
        ConfigError: an argument is not UTF-8, not `KEY=VALUE`, or removes a key (`~KEY`).
    """
    values: dict[str, str] = {}
    for text in overrides:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{text.encode(errors='replace').decode()}: not UTF-8") from None
        match = _OVERRIDE.fullmatch(text)
        if text.startswith("~"):
            raise ConfigError(f"{text}: keys cannot be removed; use KEY=VALUE")
        if match is None:
            raise ConfigError(f"{text!r}: expected KEY=VALUE")
        values[match["key"]] = match["value"]
    return values


def _check_keys(given: Mapping[str, str], cls: type[EngineConfig], command: str, own: Mapping[str, Choice]) -> None:
    valid = {key for key, _ in dotted_keys(cls)} | {f"scheduler.{key}" for choice in own.values() for key in choice}
    valid |= {key.rpartition(".")[0] for key in valid} - {""}
    valid |= load_command(command)[1].keys()
    for key in given:
        if key in cls.INSTEAD:
            raise ConfigError(f"{key}: searched by {command}; use {cls.INSTEAD[key]} to fix it")
        if key.startswith("hydra.callbacks"):
            raise ConfigError(f"{key}: hydra callbacks are not supported")
        if key.startswith(("hydra.sweeper", "hydra/sweeper")):
            raise ConfigError(f"{key}: hydra sweepers are not supported; use commas, as in -m scheduler.chunk=128,256")
        if key not in valid and not key.startswith(("hydra.", "hydra/")):
            raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")


def _is_free_text(key: str, value: str) -> bool:
    """Return whether the value is free text. `null` is not, except as a prompt."""
    return key in FREE_TEXT and (value != "null" or key == "prompt")


def _values(override: Override) -> list[str]:
    """Return the values of an override in hydra's grammar: all of a sweep, else one."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    if override.key_or_group in GROUPS:
        return [str(override.value())]
    return [(override.input_line or "").partition("=")[2]]


def _keys_of(overrides: Iterable[str], group: str) -> list[str]:
    """Return the keys of a group in `overrides`, without the group's prefix."""
    return [key.removeprefix(f"{group}.") for key in overrides if key.startswith(f"{group}.")]


def _take_policy_files(given: dict[str, str]) -> dict[str, Choice]:
    """Register each policy file in `scheduler` as a hydra choice, and return these choices by name.

    In `given`, the file is replaced by the name of the choice.

    Raises:
        ConfigError: a file is missing or its `Config` is invalid, or two files have the same name.
    """
    value = given.get("scheduler", "")
    own: dict[str, Choice] = {}
    if SUFFIX not in value:
        return own

    def choose(file: str) -> str:
        from hydra.core.config_store import ConfigStore

        choice = policy_mapping(file)
        name = choice["name"] = re.sub(r"[^\w.-]", "_", choice["name"])
        if own.setdefault(name, choice)["file"] != choice["file"]:
            raise ConfigError(f"scheduler={value}: two files are named {name}; rename one")
        ConfigStore.instance().store(group="scheduler", name=name, node=choice)
        return name

    whole = is_policy_file(value) and os.path.isfile(os.path.expanduser(value))
    given["scheduler"] = choose(value) if whole else _POLICY_FILE.sub(lambda match: choose(match[0]), value)
    return own


def _store(cls: type[EngineConfig], parallel: str) -> None:
    """Store the choices without YAML files for hydra: schema defaults, policies, workloads and rank grids."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance().store
    store(name="schema", node=defaults(cls))
    for name in {*group_names("parallel"), *re.findall(r"\w+", parallel)}:
        if (grid := grid_of(name)) is not None:
            store(group="parallel", name=name, node=grid)
    for group in families(cls):
        for name in group_names(group):
            store(group=group, name=name, node=load_group(group, name))


def literal(value: Any) -> str:
    """Return a plain value in hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(literal, value)) + "]"
    return quote(value) if isinstance(value, str) else value_text(value)


def _one_line(error: BaseException) -> str:
    """Return the first line of a hydra error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    return (f"{key}: " if key else "") + (lines[0] if lines else type(error).__name__)
