"""The files of docs/deploy/ hold: they parse, and the commands in them compose."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gapless.conf.schema import ServeConfig
from gapless.launch import compose
from tests.support.pins import pinned, pins_of

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "docs" / "deploy"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8")))


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return found


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string((DEPLOY / "gapless.service").read_text(encoding="utf-8").replace("\\\n", " "))
    return parsed


def config_of(command: str, tmp_path: Path) -> ServeConfig:
    """Compose the command of a file; its model is a folder of the reader's."""
    (tmp_path / "my-llama").mkdir()
    program, name, *overrides = shlex.split(command)
    assert (Path(program).name, name) == ("gapless", "serve")
    overrides = [
        f"model={tmp_path}/my-llama" if text.startswith("model=") else text.replace("$POD_IP", "10.0.0.1")
        for text in overrides
    ]
    return compose.compose_one(overrides, ServeConfig, "serve")


def test_the_unit_s_command_composes_and_gets_its_time_to_drain(tmp_path: Path) -> None:
    service = unit()["Service"]
    config = config_of(service["ExecStart"], tmp_path)
    assert config.serve.api_keys == ("@%d/keys",)
    assert service["LoadCredential"].startswith("keys:")
    assert int(service["TimeoutStopSec"]) >= config.serve.drain_s + 15
    assert int(service["LimitNOFILE"]) > config.serve.max_connections


def test_the_job_fits_its_cluster(tmp_path: Path) -> None:
    job = manifest("RayJob")["spec"]
    config = config_of(job["entrypoint"], tmp_path)
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == config.parallel.pp
    (container,) = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.parallel.tp
    (head,) = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in head["env"]] == ["POD_IP"]
    assert config.serve.port in [port["containerPort"] for port in head["ports"]]
    assert config.serve.host == "0.0.0.0"
    assert job["rayClusterSpec"]["rayVersion"] == pinned(pins_of("constraints.txt"), "ray", "3.12")


def test_runs_and_models_go_where_the_image_starts() -> None:
    (*_, folder) = re.findall(r"^WORKDIR (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert manifest("RayJob")["spec"]["entrypoint"].endswith(f" hydra.run.dir={folder}/run")
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert f'-v "$PWD/my-llama:{folder}/my-llama:ro"' in page


@pytest.mark.parametrize("group", ["headGroupSpec", "workerGroupSpecs"])
def test_what_a_pod_mounts_is_among_its_volumes(group: str) -> None:
    found = manifest("RayJob")["spec"]["rayClusterSpec"][group]
    spec = (found if isinstance(found, dict) else found[0])["template"]["spec"]
    (container,) = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_service_and_policy_select_the_pods() -> None:
    template = manifest("RayJob")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    labels = template["metadata"]["labels"]
    assert manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels | {"ray.io/node-type": "head"}


def test_prometheus_scrapes_the_default_address() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
