"""What several files of the project say must agree: Python versions, pins, the image's contents, names of classes."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support.pins import CUDA_OF, pinned, pins_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))


def needed() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    return [each for each in map(Requirement, texts) if each.name not in ("gapless", "setuptools")]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("constraints", CUDA_OF)
def test_each_python_has_one_pin_of_each_package_within_its_bounds(constraints: str, python: str) -> None:
    pins = pins_of(constraints)
    for requirement in needed():
        assert requirement.specifier.contains(pinned(pins, requirement.name, python)), requirement


def workflow(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize(("name", "job"), [("ci", "check"), ("release", "test")])
def test_workflows_run_on_the_pythons_that_the_package_names(name: str, job: str) -> None:
    assert workflow(name)["jobs"][job]["strategy"]["matrix"]["python"] == PYTHONS


@pytest.mark.parametrize(("name", "expected"), [("ci", {"run"}), ("release", {"build-dist", "try-wheel"})])
def test_scripts_that_workflows_run_are_there(name: str, expected: set[str]) -> None:
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    scripts = {word for step in steps for word in step.get("run", "").split() if word.startswith(".ci/")}
    assert scripts == {f".ci/{script}" for script in expected}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_clients_run_weekly_and_on_demand() -> None:
    clients = workflow("clients")
    assert clients[True].keys() == {"schedule", "workflow_dispatch"}
    runs = [step.get("run", "") for step in clients["jobs"]["clients"]["steps"]]
    assert "make test-clients" in runs
    assert "\ntest-clients:" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_only_a_pushed_tag_is_published_after_its_wheel_was_tried() -> None:
    release = workflow("release")
    assert release[True].keys() == {"push", "workflow_dispatch"}  # to YAML 1.1 `on` is true
    assert release[True]["push"] == {"tags": ["v*"]}
    jobs = release["jobs"]
    assert (jobs["test"]["needs"], jobs["publish"]["needs"]) == ("build", "test")
    assert jobs["publish"]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    may_publish = [name for name, job in jobs.items() if "id-token" in job.get("permissions", release["permissions"])]
    assert may_publish == ["publish"]


def test_pre_commit_s_ruff_is_the_pinned_one() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["rev"] for repo in hooks["repos"]] == [f"v{pinned(pins_of('constraints.txt'), 'ruff', PYTHONS[0])}"]


def test_the_image_gets_every_room() -> None:
    taken = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE))
    rooms = {link.name for link in (ROOT / "src" / "gapless").iterdir() if link.is_symlink()}
    assert len(rooms) == 6
    files = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints-common.txt"}
    assert taken >= rooms | files | {"src", *CUDA_OF}
    assert all((ROOT / path).exists() for path in taken)


@pytest.mark.parametrize("form", ["bug", "idea"])
def test_issue_forms_have_what_github_needs(form: str) -> None:
    loaded = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= loaded.keys()
    assert all({"type", "attributes"} <= part.keys() and part["attributes"]["label"] for part in loaded["body"])
    assert len({part["id"] for part in loaded["body"]}) == len(loaded["body"])


def test_no_two_public_classes_share_a_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for room in ("conf", "kernels", "parallel", "models", "runtime", "launch"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
