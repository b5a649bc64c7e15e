"""The documents hold: links and paths exist, commands compose, the Python example runs."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gapless.conf.build import dotted_keys, grid_of, group_names
from gapless.conf.policies import POLICY_CONFIGS
from gapless.conf.profiling import ProfileConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import BenchConfig, GenerateConfig, ServeConfig, SimulateConfig
from gapless.conf.serving import ServingConfig
from gapless.conf.tuning import CapacityConfig, TuneConfig
from gapless.conf.workloads import WORKLOAD_CONFIGS
from gapless.launch import compose
from gapless.launch.cli import main
from gapless.launch.commands import COMMANDS
from gapless.launch.serve_arguments import as_overrides
from gapless.runtime.analysis.ledger.causes import CAUSES
from tests.support.forked import execute, finish

ROOT = Path(__file__).parent.parent
ROOMS = ("conf", "kernels", "parallel", "models", "runtime", "launch", "tests", "benchmarks", "docs", ".ci")
DOCUMENTS = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.DOTALL | re.MULTILINE)


def prose(document: str) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.DOTALL | re.MULTILINE)


def anchors(document: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    for link in links:
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            folder = (ROOT / document).parent
            assert not path or (folder / path).exists(), link
            target = os.path.relpath(folder / path, ROOT) if path else document
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document: str) -> None:
    named = re.findall(rf"(?<![\w./])((?:{'|'.join(map(re.escape, ROOMS))})/[\w./-]*)", text_of(document))
    for path in set(named):
        assert (ROOT / path).exists() or "NAME" in path, path


def sources() -> str:
    """All Python sources of the package."""
    rooms = ("conf", "kernels", "launch", "models", "parallel", "runtime")
    return "\n".join(path.read_text(encoding="utf-8") for room in rooms for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize(("section", "least"), [("Glossary", 20), ("Where to add", 18)])
def test_names_in_the_tables_of_the_architecture_are_those_of_the_code(section: str, least: int) -> None:
    text = text_of("ARCHITECTURE.md").partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*$", text, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", row)}
    names = {name for name in names if name != "NAME" and not name.endswith((".py", ".csv", ".json", ".toml"))}
    words = set(re.findall(r"\w+", sources()))
    assert len(names) >= least
    assert [name for name in names if not set(re.split(r"\W", name)) <= words] == []


CONFIGS = {
    "generate": GenerateConfig,
    "bench": BenchConfig,
    "simulate": SimulateConfig,
    "profile": ProfileConfig,
    "capacity": CapacityConfig,
    "tune": TuneConfig,
    "serve": ServeConfig,
}


def notebook_cells() -> list[str]:
    """Return the code of the quickstart notebook, by cell."""
    cells = json.loads(text_of("docs/quickstart.ipynb"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def commands() -> list[tuple[str, str]]:
    """On each command line of the documents' shell blocks, the command that hydra composes and what follows it."""
    found = []
    shell = [block for document in DOCUMENTS for block in blocks(document, "sh")]
    shell += [cell for cell in notebook_cells() if cell.startswith("%%bash")]
    for block in shell:
        for line in block.replace("\\\n", " ").splitlines():
            for name in CONFIGS:
                if f" {name} " in line and not line.startswith(("aiperf ", "vllm ")):
                    found.append((name, line.split(f" {name} ", 1)[1]))
    return found


def test_documents_hold_commands() -> None:
    assert len(commands()) >= 16


@pytest.mark.parametrize(("name", "command"), commands())
def test_commands_compose(name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-llama").mkdir()
    (policy,) = blocks("docs/policies.md", "python")
    (tmp_path / "shortest_rest_first.py").write_text(policy, encoding="utf-8")
    arguments = shlex.split(command, comments=True)
    arguments = as_overrides(arguments, COMMANDS[name]) if COMMANDS[name].takes_vllm_options else arguments
    overrides, multirun = [argument for argument in arguments if argument != "-m"], "-m" in arguments
    assert compose.compose_all(overrides, CONFIGS[name], name, multirun=multirun)


def test_keys_and_choices_named_in_prose_are_valid() -> None:
    keys = {key for config in CONFIGS.values() for key, _ in dotted_keys(config)}
    groups = "model|hardware|cluster|parallel|scheduler|cache|sampling|workload|slo|simulation|serve"
    named = [
        (document, *found)
        for document in DOCUMENTS
        for found in re.findall(rf"`({groups})(\.[\w.]+)?(?:=([^`\s]*))?(?= |`)", prose(document))
    ]
    assert len(named) > 10
    for document, group, rest, value in named:
        if rest:
            assert group + rest in keys, (document, group + rest)
        elif value:
            is_own = group in ("model", "scheduler") and value.startswith("./")  # the reader's own folder or file
            is_grid = group == "parallel" and grid_of(value) is not None
            assert is_own or is_grid or value in group_names(group), (document, group, value)


def own_fields(config: type) -> set[str]:
    """Keys that a policy or a workload has beyond those of all."""
    inherited = {name for base in config.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
    return set(config.__dataclass_fields__) - inherited


def names_and_own_keys(configs: Mapping[str, type]) -> list[str]:
    return [*configs, *{key for config in configs.values() for key in own_fields(config)}]


EVERY = {
    "README.md": [*POLICY_CONFIGS],
    "docs/scheduling.md": names_and_own_keys(POLICY_CONFIGS),
    "docs/bench.md": names_and_own_keys(WORKLOAD_CONFIGS),
    "docs/ledger.md": [*map(str, CAUSES)],
    "docs/glossary.md": [*map(str, CAUSES)],
    "docs/reading_a_report.md": [*map(str, CAUSES)],
    "docs/serve.md": [f"serve.{name}" for name in ServingConfig.__dataclass_fields__],
    "docs/generate.md": [*SamplingParams.__dataclass_fields__],
}


@pytest.mark.parametrize("document", EVERY)
def test_a_page_names_every_policy_workload_cause_or_key(document: str) -> None:
    text = prose(document)
    assert [name for name in EVERY[document] if f"`{name}`" not in text] == []


def test_the_readme_shows_each_command() -> None:
    shown = [line.split()[1] for block in blocks("README.md", "sh") for line in block.splitlines() if "gapless" in line]
    assert sorted(shown) == sorted(COMMANDS)


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_an_index_lists_every_page(folder: str) -> None:
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w+\.md)\)", text_of(f"{folder}/README.md")))


TROUBLES = "docs/troubleshooting.md"


def failing_commands() -> list[tuple[str, str]]:
    """Return the commands of the troubleshooting page, and the line that each ends with."""
    lines = [line for block in blocks(TROUBLES, "console") for line in block.splitlines()]
    return [(lines[i].removeprefix("$ "), lines[i + 1]) for i in range(0, len(lines), 2)]


@pytest.mark.parametrize(("command", "error"), failing_commands())
def test_commands_fail_as_the_page_says(
    command: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    for folder in ("my-llama", "pickled"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pickled/config.json").write_text("{}")
    (tmp_path / "pickled/pytorch_model.bin").touch()
    (tmp_path / "prompts.jsonl").write_text('{"promt": "import os"}\n')
    program, *arguments = shlex.split(command)
    assert program == "gapless"
    assert main(arguments) == 2
    assert capsys.readouterr().err.replace(str(tmp_path), "/home/me") == f"{error}\n"


def test_errors_of_running_pipelines_are_those_of_the_code() -> None:
    """Every stretch of words in such an error, between the values in it, is in a source."""
    joined = re.sub(r"\"\s*\n\s*f?\"", "", sources())  # a text over several lines
    errors = "\n".join(blocks(TROUBLES, "text")).replace("gapless: error: ", "")
    parts = re.findall(r"(?<!\S)(?:[a-z']+[,;]? )+[a-z]+(?![^\s,;:])", errors)
    assert len(parts) > 20
    assert [part for part in parts if part not in joined] == []


@pytest.mark.parametrize("example", [*blocks("README.md", "python"), *blocks("docs/generate.md", "python")])
def test_python_examples_run(example: str, tmp_path: Path) -> None:
    done = finish(execute, example, [], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
