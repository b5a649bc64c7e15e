"""The two sets of pins fit together: torch, xformers and the rest, each set for one major version of CUDA."""

from __future__ import annotations

import importlib.metadata
import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.pins import CUDA_OF, ROOT, files_of_wheel, pinned, pins_of, wheel_urls

PYTHON = "3.12"  # of the image for GPUs


def installed(name: str, version: str) -> Distribution:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert found.version.partition("+")[0] == version, f"{name} {found.version} is installed, {version} is pinned"
    return found


def test_every_set_is_the_common_pins_and_a_torch() -> None:
    assert {path.name for path in ROOT.glob("constraints*.txt")} == {*CUDA_OF, "constraints-common.txt"}
    common = {pin.name for pin in pins_of("constraints-common.txt")}
    assert "torch" not in common
    for name in CUDA_OF:
        assert {pin.name for pin in pins_of(name)} - common == {"torch"}, name


@pytest.mark.parametrize("name", CUDA_OF)
def test_what_asks_for_torch_takes_the_pinned_one(name: str) -> None:
    pins = pins_of(name)
    torch = pinned(pins, "torch", PYTHON)
    askers = 0
    for pin in pins:
        try:
            requirements = importlib.metadata.requires(pin.name) or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, requirements):
            if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate()):
                askers += 1
                assert requirement.specifier.contains(torch), f"{pin.name} needs {requirement}"
    assert askers > 1


def test_xformers_wheel_was_built_for_the_torch_of_cuda_12() -> None:
    pins = pins_of("constraints-cuda12.txt")
    found = installed("xformers", pinned(pins, "xformers", PYTHON))
    built = json.loads(found.read_text("../xformers/cpp_lib.json") or "{}").get("version")
    if not built or not built["cuda"]:
        pytest.skip("this build of xformers is not the one of the index")
    assert Version(built["torch"]).base_version == pinned(pins, "torch", PYTHON)
    assert built["cuda"] // 100 == CUDA_OF["constraints-cuda12.txt"]  # 1208: CUDA 12.8


def wheel_of(name: str, version: str) -> str:
    """Return the URL of the newest build of a wheel; skip the test where no index answers."""
    try:
        urls = wheel_urls(name, version, PYTHON)
    except OSError as error:
        pytest.skip(f"no index answers: {error}")
    if not urls:
        pytest.skip("no index answers, or this one has another build of it")
    return urls[0]


def texts(url: str, ending: str) -> list[str]:
    try:
        return [text for _, text in files_of_wheel(url, ending)]
    except OSError as error:
        pytest.skip(f"no index answers: {error}")


@pytest.mark.slow  # it asks an index
@pytest.mark.parametrize("name", CUDA_OF)
def test_torch_s_wheel_is_for_the_set_s_cuda_and_takes_the_other_pins(name: str) -> None:
    pins = pins_of(name)
    version = pinned(pins, "torch", PYTHON)
    url = wheel_of("torch", version)
    (metadata,) = texts(url, "/METADATA")
    (built,) = texts(url, "torch/version.py")
    requirements = [Requirement(text) for text in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)]
    majors = {int(found[1]) for each in requirements if (found := re.search(r"^nvidia-.*-cu(\d+)$", each.name))}
    toolkits = [str(each.specifier) for each in requirements if each.name == "cuda-toolkit"]
    majors |= {int(found[1]) for text in toolkits if (found := re.match(r"==(\d+)\.", text))}
    assert majors == {CUDA_OF[name]}
    assert re.search(rf"^__version__ = '{re.escape(version)}\+cu{CUDA_OF[name]}\d'$", built, re.MULTILINE), built
    pinned_names = {pin.name for pin in pins}
    for requirement in requirements:
        if requirement.name in pinned_names and (requirement.marker is None or requirement.marker.evaluate()):
            assert requirement.specifier.contains(pinned(pins, requirement.name, PYTHON)), requirement


@pytest.mark.slow  # it asks an index
def test_the_index_s_xformers_is_built_for_cuda_12_too() -> None:
    pins = pins_of("constraints-cuda12.txt")
    url = wheel_of("xformers", pinned(pins, "xformers", PYTHON))
    (text,) = texts(url, "xformers/cpp_lib.json")
    built = json.loads(text)["version"]
    torch = Version(built["torch"])
    assert (torch.base_version, built["cuda"] // 100) == (pinned(pins, "torch", PYTHON), 12)
    assert torch.local == f"cu{built['cuda'] // 100}{built['cuda'] % 100}"


@pytest.mark.parametrize("path", ["Dockerfile", "docs/install.md", "docs/deploy.md", "docs/first_start_on_gpus.md"])
def test_what_is_written_on_gpus_names_both_sets(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert all(name in text for name in CUDA_OF), path


def test_install_s_table_has_the_pinned_versions() -> None:
    table = re.findall(r"^\| CUDA .*$", (ROOT / "docs/install.md").read_text(encoding="utf-8"), re.MULTILINE)
    for (name, major), row in zip(CUDA_OF.items(), table, strict=True):
        assert f"CUDA Version {major}." in row
        assert f"`{name}` | {pinned(pins_of(name), 'torch', PYTHON)} |" in row
    assert f"xformers {pinned(pins_of('constraints-cuda12.txt'), 'xformers', PYTHON)} " in table[-1]
