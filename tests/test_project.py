"""What several files of the project say must agree: Python versions, pins, the image's contents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))


def pinned(name: str, python: str) -> str:
    """The one version that constraints.txt gives this Python."""
    environment = {"python_version": python}
    (pin,) = [pin for pin in PINS if pin.name == name and (pin.marker is None or pin.marker.evaluate(environment))]
    (only,) = pin.specifier
    return only.version


def needed() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    return [each for each in map(Requirement, texts) if each.name not in ("gapless", "setuptools")]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_has_one_pin_of_each_package_within_its_bounds(python: str) -> None:
    names = {pin.name.lower(): pin.name for pin in PINS}
    for requirement in needed():
        assert requirement.specifier.contains(pinned(names[requirement.name.lower()], python)), requirement


def test_ci_runs_on_the_pythons_that_the_package_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == PYTHONS
    commands = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]
    assert all((ROOT / command).is_file() for command in commands)


def test_pre_commit_s_ruff_is_the_pinned_one() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["rev"] for repo in hooks["repos"]] == [f"v{pinned('ruff', PYTHONS[0])}"]


def test_the_image_gets_every_room() -> None:
    taken = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE))
    rooms = {source.partition("/")[0] for source in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert taken >= rooms | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert all((ROOT / path).exists() for path in taken)


@pytest.mark.parametrize("form", ["bug", "idea"])
def test_issue_forms_have_what_github_needs(form: str) -> None:
    loaded = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= loaded.keys()
    assert all({"type", "attributes"} <= part.keys() and part["attributes"]["label"] for part in loaded["body"])
    assert len({part["id"] for part in loaded["body"]}) == len(loaded["body"])
