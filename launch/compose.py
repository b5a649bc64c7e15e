"""From a command line's overrides to configs: hydra composes, `conf.build` checks, each error is one line.

Everything is checked before hydra makes a folder: keys against the schema, group choices against the YAML files, and
each config of a sweep by building it. Free-text values are quoted for hydra's grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..conf.build import (
    GROUPS,
    build,
    dotted_keys,
    group_names,
    load_command,
    load_group,
    locate,
    model_choice,
    unknown_key,
)
from ..conf.errors import ConfigError, nearest
from ..conf.schema import EngineConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

E = TypeVar("E", bound=EngineConfig)

CONFIG_MODULE = "gapless.conf"
FREE_TEXT = ("prompt", "prompts", "outputs", "model.weights", "model.tokenizer", "model.name")
_TOKEN = re.compile(r"(?P<mark>\+{0,2}|~)(?P<key>[^=+~\s][^=\s]*)=(?P<value>.*)", re.DOTALL)
_INTERPOLATION = re.compile(r"(\\*)\$\{")


@dataclass(frozen=True, slots=True)
class Token:
    """One override of the command line, its `+` or `++` taken off: hydra's need for it is found from the schema."""

    key: str
    value: str

    @property
    def for_hydra(self) -> bool:
        """Whether it steers hydra itself (`hydra.run.dir`, `hydra/launcher`), not the run's config."""
        return self.key.startswith(("hydra.", "hydra/"))


def rewrite(overrides: Sequence[str], cls: type[EngineConfig], command: str) -> list[str]:
    """Overrides as hydra takes them: free text quoted, `model=FOLDER` spelled out, `+` where a YAML lacks the key.

    Raises:
        ConfigError: no `KEY=VALUE`, an unknown key, or a key that cannot be set so.
    """
    last = {token.key: token for token in map(_token, overrides)}  # of one key given twice, the later holds
    tokens = list(last.values())
    present = _keys_in_yaml(command, tokens)
    valid = dict(dotted_keys(cls))
    parents = {key.rpartition(".")[0] for key in valid} - {""}
    result: list[str] = []
    for token in tokens:
        key, value = token.key, token.value
        if token.for_hydra:
            result.append(f"{key}={value}" if key.startswith("hydra/") else f"++{key}={value}")
        elif key == "model":
            choice, extra = model_choice(value)
            result.append(f"model={choice}")
            result += [f"++model.{k}={quote(v)}" for k, v in extra.items() if f"model.{k}" not in last]
        elif key in GROUPS:
            result.append(f"{key}={value}")
        elif key in valid or key in parents:
            text = quote(value) if key in FREE_TEXT and not _is_null(key, value) else value
            result.append(f"{'' if key in present else '++'}{key}={text}")
        else:
            raise ConfigError(f"{key}: unknown key{unknown_key(cls, key)}")
    return result


def quote(text: str) -> str:
    """`text` as a quoted value of hydra's grammar, its `${` kept from being an interpolation."""
    from hydra.core.override_parser.types import Quote, QuotedString

    literal = _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", text)
    return QuotedString(literal, Quote.single).with_quotes()


def compose_all(overrides: Sequence[str], cls: type[E], command: str, *, multirun: bool) -> list[E]:
    """Each config that the rewritten `overrides` stand for: one, or one a point of the sweep.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with _hydra() as loader:
        parser = OverridesParser.create(config_loader=loader)
        parsed = []
        for text in overrides:
            try:
                (override,) = parser.parse_overrides([text])
            except HydraException as error:
                raise ConfigError(f"{text.lstrip('+')}: {_grammar(error)}") from None
            _check_sweep(override, multirun)
            parsed.append(override)
        try:
            points = _points(parsed) if multirun else [list(overrides)]
            return [_compose(point, cls, command) for point in points]
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(error)) from None


def to_config(composed: DictConfig, cls: type[E]) -> E:
    """The checked config of what hydra composed.

    Raises:
        ConfigError: an unknown key, a wrong type or value, a missing folder, an interpolation that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        mapping = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from None
    assert isinstance(mapping, dict)
    plain = {str(key): value for key, value in mapping.items()}
    return locate(build(cls, plain))


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


def _is_null(key: str, value: str) -> bool:
    """`null` is no file and no folder; as a prompt it is a word like others."""
    return value == "null" and key != "prompt"


def _keys_in_yaml(command: str, tokens: Sequence[Token]) -> set[str]:
    """Dotted keys that the composed YAML holds whatever is chosen; hydra wants `+` for others."""
    own, chosen = load_command(command)
    present = set(_flatten(own))
    chosen |= {token.key: token.value for token in tokens if token.key in GROUPS}
    for group in GROUPS:
        name = model_choice(chosen[group])[0] if group == "model" else chosen[group]
        if name in group_names(group):
            present |= {f"{group}.{key}" for key in _flatten(load_group(group, name))}
    return present


def _flatten(mapping: dict[str, Any]) -> Iterator[str]:
    for key, value in mapping.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{below}" for below in _flatten(value))


@contextmanager
def _hydra() -> Iterator[Any]:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _check_sweep(override: Override, multirun: bool) -> None:
    key = override.key_or_group
    if override.is_sweep_override() and not multirun:
        value = (override.input_line or "").partition("=")[2]
        raise ConfigError(f"{key}={value}: several values are a sweep; add -m to run each")
    if key in GROUPS:
        names = _swept(override) if override.is_sweep_override() else [str(override.value())]
        for name in names:
            if name not in group_names(key):
                hint = " (or a path with a / in it)" if key == "model" else ""
                raise ConfigError(f"{key}={name}: unknown{nearest(name, group_names(key))}{hint}")


def _swept(override: Override) -> list[str]:
    return list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []


def _points(parsed: list[Override]) -> list[list[str]]:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (points,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return points


def _compose(overrides: list[str], cls: type[E], command: str) -> E:
    from hydra import compose

    return to_config(compose(command, overrides), cls)


def _grammar(error: Exception) -> str:
    """hydra's grammar complaint without its picture of the position."""
    first = _one_line(error)
    return f"not a value that hydra can read ({first}); quote it, as in KEY='...' within the shell's own quotes"


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    return (f"{key}: " if key else "") + (lines[0] if lines else type(error).__name__)
