"""Composes configs from the overrides of a command line: hydra composes, `conf.build` checks, each error is one line.

Everything is checked before hydra makes a folder: keys against the schema, group choices against the YAML files, and
each config of a sweep by building it. Free-text values are quoted for hydra's grammar. Where several policies or
workloads are named, a key applies to those of them that have it.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml

from ..conf.build import (
    GROUPS,
    assign,
    build,
    dotted_keys,
    families,
    fields,
    group_names,
    having_it,
    load_command,
    load_group,
    locate,
    member,
    members_with,
    model_choice,
    unknown_key,
)
from ..conf.errors import ConfigError, nearest
from ..conf.policies import SchedulerConfig
from ..conf.policy_file import SUFFIX, is_policy_file, policy_mapping
from ..conf.schema import EngineConfig

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

C = TypeVar("C")
Choice = dict[str, Any]  # the keys of one choice of a group
E = TypeVar("E", bound=EngineConfig)

CONFIG_MODULE = "gapless.conf"
FREE_TEXT = (
    *("prompt", "prompts", "outputs", "model.weights", "model.tokenizer", "model.name"),
    *("workload.path", "scheduler.profile", "simulation.profile", "check"),
)
EXTRAS = {"hydra/launcher=joblib": "sweep"}  # choices of hydra's that an extra installs
_TOKEN = re.compile(r"(?P<mark>\+{0,2}|~)(?P<key>[^=+~\s][^=\s]*)=(?P<value>.*)", re.DOTALL)
_POLICY_FILE = re.compile(r"[^,()\s'\"]+\.py(?![^,()\s'\"])")
_INTERPOLATION = re.compile(r"(\\*)\$\{")


@dataclass(frozen=True, slots=True)
class Token:
    """One override of the command line without its `+` or `++`; where hydra needs them, the schema says."""

    key: str
    value: str

    @property
    def for_hydra(self) -> bool:
        """Whether the override is for hydra itself (`hydra.run.dir`, `hydra/launcher`), not for the run's config."""
        return self.key.startswith(("hydra.", "hydra/"))


def rewrite(overrides: Sequence[str], cls: type[EngineConfig], command: str, *, multirun: bool = False) -> list[str]:
    """Rewrite overrides for hydra: quote free text, spell out `model=FOLDER`, add `++` where a YAML lacks the key.

    Several policies without a sweep (`scheduler=a,b` of a command that has `policies`) become the first of them and
    `policies`, each whole.

    Raises:
        ConfigError: no `KEY=VALUE`, an unknown key, or a key that cannot be set so.
    """
    last = {token.key: token for token in map(_token, overrides)}  # of one key given twice, the later holds
    for key in last:
        if key in cls.INSTEAD:
            raise ConfigError(f"{key}: {command} searches it; {cls.INSTEAD[key]} fixes it")
    own = _take_policy_files(last)
    valid = dict(dotted_keys(cls)) | {f"scheduler.{key}": str for mapping in own.values() for key in mapping}
    parents = {key.rpartition(".")[0] for key in valid} - {""}
    groups = load_command(command)[1]
    for key in last:
        if not (last[key].for_hydra or key in groups or key in valid or key in parents):
            raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")
    policies = ""
    shipped = [policy["name"] for policy in load_command(command)[0].get("policies", ())]
    if shipped and "policies" not in last:  # what is compared where the command line names no policy
        if "scheduler" in last:
            policies = "[]"
        else:
            last["scheduler"] = Token("scheduler", ",".join(shipped))
            policies = _take_policies(last, own)
    if multirun:
        _check_members(last, cls, own)
    elif "policies" in valid:
        policies = _take_policies(last, own) or policies
    present = _keys_in_yaml(command, last.values())
    result: list[str] = []
    for key, token in last.items():
        value = token.value
        if token.for_hydra:
            if key.startswith("hydra/"):
                _check_hydra_choice(token)
            result.append(f"{key}={value}" if key.startswith("hydra/") else f"++{key}={value}")
        elif key == "model":
            choice, extra = model_choice(value)
            result.append(f"model={choice}")
            result += [f"++model.{k}={quote(v)}" for k, v in extra.items() if f"model.{k}" not in last]
        elif key in groups:
            result.append(f"{key}={value}")
        else:
            text = quote(value) if _is_free_text(token) else value
            result.append(f"{'' if key in present else '++'}{key}={text}")
    return [*result, f"policies={policies}"] if policies else result


def from_arguments(arguments: Sequence[str], cls: type[C], positional: str, others: str | None = None) -> C:
    """Build the config of a command without hydra: bare words become the list of the key `positional`, and overrides of
    keys that `cls` lacks that of `others`, where it is given.

    Raises:
        ConfigError: an unknown key, a value that is no YAML, a wrong type or value.
    """
    words: list[str] = []
    mapping: dict[str, Any] = {positional: words}
    valid = dict(dotted_keys(cls))
    for text in arguments:
        match = _TOKEN.fullmatch(text)
        if match is None or os.path.exists(text):
            words.append(text)
            continue
        key, value = match["key"], match["value"]
        if key not in valid:
            if others is not None:
                mapping.setdefault(others, []).append(text)
                continue
            raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"{key}={value}: not a value that YAML can read") from None
        takes_text = str in typing.get_args(valid[key]) and not isinstance(parsed, list)
        texts = isinstance(parsed, str) or takes_text or valid[key] is str
        assign(mapping, key, value if texts and parsed is not None else parsed, cls)
    return build(cls, mapping)


def quote(text: str) -> str:
    """Quote `text` for hydra's grammar, with `${` escaped so that it is no interpolation."""
    from hydra.core.override_parser.types import Quote, QuotedString

    literal = _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", text)
    return QuotedString(literal, Quote.single).with_quotes()


def compose_all(overrides: Sequence[str], cls: type[E], command: str, *, multirun: bool) -> list[E]:
    """Compose the configs of the rewritten `overrides`: one, or one per point of the sweep.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with hydra_loader() as loader:
        parsed = parse(overrides, loader, multirun=multirun)
        several = _several(parsed, cls) if multirun else set()
        try:
            points = _points(parsed) if multirun else [list(overrides)]
            return [_compose(point, cls, command, several) for point in points]
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(error)) from None


def parse(overrides: Sequence[str], loader: ConfigLoader, *, multirun: bool) -> list[Override]:
    """Parse and check the rewritten `overrides`.

    Raises:
        ConfigError: one is not in hydra's grammar, chooses what a group lacks, or has several values without a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=loader)
    parsed = []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            raise ConfigError(f"{text.lstrip('+')}: {_grammar(error)}") from None
        _check_sweep(override, multirun)
        parsed.append(override)
    return parsed


def compose_one(overrides: Sequence[str], cls: type[E], command: str) -> E:
    """Compose the config of a command line's overrides; a `ConfigError` says in one line what is wrong."""
    (config,) = compose_all(rewrite(overrides, cls, command), cls, command, multirun=False)
    return config


def to_config(composed: DictConfig, cls: type[E]) -> E:
    """Build and check the config that hydra composed.

    Raises:
        ConfigError: an unknown key, a wrong type or value, a missing folder, an interpolation that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        mapping = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(mapping, dict)
    plain = {str(key): value for key, value in mapping.items()}
    return locate(build(cls, plain))


def output_folder(overrides: Sequence[str], command: str, kind: Literal["run", "sweep"]) -> str | None:
    """Return what `hydra.run.dir` or `hydra.sweep.dir` comes to now; None where it depends on the keys of a run."""
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    own = [text for text in overrides if text.startswith(("hydra/", "++hydra."))]
    with hydra_loader():
        try:
            return str(compose(command, own, return_hydra_config=True).hydra[kind].dir)
        except (HydraException, OmegaConfBaseException):
            return None


def swept_families(overrides: Sequence[str], cls: type[EngineConfig]) -> set[str]:
    """Return which of `scheduler` and `workload` have several choices in the rewritten `overrides` of a sweep."""
    with hydra_loader() as loader:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        return _several(OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)), cls)


def drop_foreign(composed: DictConfig, cls: type[EngineConfig], swept: set[str]) -> list[str]:
    """Remove from one point of a sweep the keys that its policy or workload lacks and others have; return them."""
    from omegaconf import open_dict

    dropped: list[str] = []
    for group in swept:
        mapping = composed[group]
        named = {key: mapping[key] for key in ("name", "file") if key in mapping}
        known = fields(member(families(cls)[group], named, group))
        for key in list(mapping):
            if key not in known:
                with open_dict(mapping):
                    del mapping[key]
                dropped.append(f"{group}.{key}")
    return dropped


def _several(parsed: Sequence[Override], cls: type[EngineConfig]) -> set[str]:
    return {o.key_or_group for o in parsed if o.key_or_group in families(cls) and o.is_sweep_override()}


def _choices(token: Token | None) -> list[str]:
    """Return the choices of a group where there are several; else nothing."""
    if token is None or not re.search(r"[,(]", token.value):
        return []
    override = _parse(token)
    return _swept(override) if override.is_sweep_override() else []


def _parse(token: Token) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    with hydra_loader() as loader:
        try:
            (override,) = OverridesParser.create(config_loader=loader).parse_overrides([f"{token.key}={token.value}"])
        except HydraException as error:
            raise ConfigError(f"{token.key}={token.value}: {_grammar(error)}") from None
    return override


def _check_members(tokens: Mapping[str, Token], cls: type[EngineConfig], own: Mapping[str, Choice]) -> None:
    """Check that one of the swept policies or workloads has each key that is set; points without the key drop it."""
    for group, base in families(cls).items():
        names = _choices(tokens.get(group))
        if not set(names) <= {*group_names(group), *own}:
            continue  # an unknown choice is an error when the sweep is composed
        for key in _keys_of(tokens, group) if names else ():
            _check_had(group, key, base, names, own)


def _check_had(group: str, key: str, base: type, names: Sequence[str], own: Mapping[str, Choice]) -> None:
    having = _having(base, key, own)
    if having and not set(having) & set(names):
        raise ConfigError(f"{group}.{key}: unknown key of {', '.join(names)}; {having_it(having)}")


def _check_hydra_choice(token: Token) -> None:
    """Check that hydra's own group, `hydra/launcher` for instance, has the choice; plug-ins add to them."""
    from hydra.core.object_type import ObjectType

    with hydra_loader() as loader:
        valid = loader.get_group_options(token.key, ObjectType.CONFIG)
    if not valid:
        raise ConfigError(f"{token.key}: unknown group of hydra's")
    if token.value not in valid and (extra := EXTRAS.get(f"{token.key}={token.value}")):
        raise ConfigError(f"{token.key}={token.value}: not installed; pip install 'gapless[{extra}]' installs it")
    if token.value not in valid:
        raise ConfigError(f"{token.key}={token.value}: unknown{nearest(token.value, valid)}")


def _keys_of(tokens: Mapping[str, Token], group: str) -> list[str]:
    return [key.removeprefix(f"{group}.") for key in tokens if key.startswith(f"{group}.")]


def _having(base: type, key: str, own: Mapping[str, Choice]) -> list[str]:
    """Return the names of the policies or workloads that have `key`, the user's own policies among them."""
    if base is not SchedulerConfig:
        return members_with(base, key)
    return members_with(base, key, {name: member(base, choice, "scheduler") for name, choice in own.items()})


def _take_policy_files(tokens: dict[str, Token]) -> dict[str, Choice]:
    """Make each policy file in `scheduler` a choice of hydra's, under the name of the file; return these choices.

    Raises:
        ConfigError: a file that is not there or holds no policy's config, or two of one name.
    """
    token = tokens.get("scheduler")
    if token is None or SUFFIX not in token.value:
        return {}
    own: dict[str, Choice] = {}

    def choose(file: str) -> str:
        from hydra.core.config_store import ConfigStore

        choice = policy_mapping(file)
        name = choice["name"] = re.sub(r"[^\w.-]", "_", choice["name"])
        if own.setdefault(name, choice)["file"] != choice["file"]:
            raise ConfigError(f"scheduler={token.value}: two files are called {name}; rename one")
        ConfigStore.instance().store(group="scheduler", name=name, node=choice)
        return name

    whole = is_policy_file(token.value) and os.path.isfile(os.path.expanduser(token.value))
    value = choose(token.value) if whole else _POLICY_FILE.sub(lambda match: choose(match[0]), token.value)
    tokens["scheduler"] = Token("scheduler", value)
    return own


def _take_policies(tokens: dict[str, Token], own: Mapping[str, Choice]) -> str:
    """Leave only the first of several policies in `tokens`, with the keys it has; return all of them in hydra's
    grammar."""
    names = _choices(tokens.get("scheduler"))
    if not names:
        return ""
    if "policies" in tokens:
        raise ConfigError("scheduler and policies both name policies; give one of them")
    mappings = [dict(own[name]) if name in own else load_group("scheduler", name) for name in names]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"scheduler={','.join(names)}: {twice} is named twice; repeats=2 runs each so often")
    for key in _keys_of(tokens, "scheduler"):
        token = tokens[f"scheduler.{key}"]
        if key == "name":
            raise ConfigError("scheduler.name: choose policies by scheduler=NAME,NAME")
        _check_had("scheduler", key, SchedulerConfig, names, own)
        value: Any = token.value
        if not _is_free_text(token):
            override = _parse(token)
            _check_sweep(override, multirun=False)
            value = override.value()
        having = _having(SchedulerConfig, key, own)
        for mapping in mappings:
            if mapping["name"] in having:
                mapping[key] = value
        if names[0] not in having:
            del tokens[token.key]
    for mapping in mappings:
        build(SchedulerConfig, mapping, "scheduler")
    tokens["scheduler"] = Token("scheduler", names[0])
    return _literal(mappings)


def _literal(value: Any) -> str:
    """Write a plain value in hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quote(value) if isinstance(value, str) else str(value)


def _token(text: str) -> Token:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text.encode(errors='replace').decode()}: not UTF-8") from None
    match = _TOKEN.fullmatch(text)
    if match is None:
        if text.startswith("~"):
            raise ConfigError(f"{text}: keys cannot be removed; set KEY=VALUE")
        raise ConfigError(f"{text!r}: not understood; overrides are KEY=VALUE")
    if match["mark"] == "~":
        raise ConfigError(f"{text}: keys cannot be removed; set KEY=VALUE")
    return Token(match["key"], match["value"])


def _is_free_text(token: Token) -> bool:
    """Return whether the value is free text. `null` is no file and no folder, but a prompt may be that word."""
    return token.key in FREE_TEXT and (token.value != "null" or token.key == "prompt")


def _keys_in_yaml(command: str, tokens: Iterable[Token]) -> set[str]:
    """Return the dotted keys that the composed YAML holds; hydra wants `+` for the others."""
    own, chosen = load_command(command)
    present = set(_flatten(own))
    given = {token.key: token.value for token in tokens if token.key in chosen}
    if "experiment" in given:  # which chooses of the other groups
        return present
    for group, choice in (chosen | given).items():
        name = model_choice(choice)[0] if group == "model" and choice else choice
        if name in group_names(group):
            present |= {f"{group}.{key}" for key in _flatten(load_group(group, name))}
    return present


def _flatten(mapping: dict[str, Any]) -> Iterator[str]:
    for key, value in mapping.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{below}" for below in _flatten(value))


@contextmanager
def hydra_loader(job: str = "app") -> Iterator[ConfigLoader]:
    """Initialize hydra for jobs of the name `job`, and yield what composes their configs."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module(CONFIG_MODULE, job, version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _check_sweep(override: Override, multirun: bool) -> None:
    key = override.key_or_group
    if override.is_sweep_override() and not multirun:
        value = (override.input_line or "").partition("=")[2]
        raise ConfigError(f"{key}={value}: several values are a sweep; add -m to run each")
    if key in GROUPS:
        names = _swept(override) if override.is_sweep_override() else [str(override.value())]
        for name in names:
            is_own = key == "scheduler" and is_policy_file(name)  # looked at when it was made a choice
            if name not in group_names(key) and not is_own:
                hint = " (or a path with a / in it)" if key == "model" else ""
                raise ConfigError(f"{key}={name}: unknown{nearest(name, group_names(key))}{hint}")


def _swept(override: Override) -> list[str]:
    return list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []


def _points(parsed: list[Override]) -> list[list[str]]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (points,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return points


def _compose(overrides: list[str], cls: type[E], command: str, swept: set[str]) -> E:
    from hydra import compose

    composed = compose(command, overrides)
    drop_foreign(composed, cls, swept)
    return to_config(composed, cls)


def _grammar(error: Exception) -> str:
    """Shorten hydra's error of its grammar to one line."""
    first = one_line(error)
    return f"not a value that hydra can read ({first}); quote it, as in KEY='...' within the shell's own quotes"


def one_line(error: BaseException) -> str:
    """Shorten an error of hydra's to one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    return (f"{key}: " if key else "") + (lines[0] if lines else type(error).__name__)
