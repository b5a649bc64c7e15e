"""On Ray nodes in racks, stages that follow each other lie on one node or in one rack."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch.test_recovery import ROOT

FOUR_NODES = r"""
from itertools import pairwise
from ray.cluster_utils import Cluster
from gapless import LLM, SamplingParams
from gapless.conf.clusters import ClusterConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from gapless.parallel.control import Endpoint
from gapless.parallel.real_placement import changes

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for rack in "baba":
    cluster.add_node(num_cpus=2, num_gpus=2, labels={"rack": rack})

def check(places, racks, nodes):
    print(places)
    where = [places[rank] for rank in sorted(places)]
    for part in ([place.node for place in where], [place.rack for place in where]):
        crossed, least = changes(part)
        assert crossed == least, part
    assert len({place.node for place in where}) == nodes
    assert {place.rack for place in where} <= {"a", "b"}
    if racks:
        assert "".join(place.rack for place in where) == racks

launcher = RayLauncher()
overrides = {"parallel.threads": 1, "parallel.ray_address": cluster.address, "parallel.start_timeout_s": 300}
with LLM("tiny", pp=4, launcher=launcher, **overrides) as llm:
    check(launcher.places(), "aabb", nodes=4)  # CPU stages spread
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3

def placed(pp, tp, devices_per_node):
    # GPUs in name only: the ranks are placed, and end as soon as they look for them.
    launcher = RayLauncher()
    parallel = ParallelConfig(pp=pp, tp=tp, launcher="ray", ray_address=cluster.address, start_timeout_s=20.0)
    gpus, described = HardwareConfig(device="cuda"), ClusterConfig(devices_per_node=devices_per_node)
    launcher.start(Endpoint("127.0.0.1", 1, ""), parallel, gpus, described)
    places = launcher.places()
    launcher.shutdown()
    for stage in range(pp):
        assert len({places[stage * tp + rank].node for rank in range(tp)}) == 1
    return places

check(placed(4, 1, devices_per_node=8), "", nodes=2)
check(placed(3, 1, devices_per_node=2), "", nodes=2)
check(placed(3, 2, devices_per_node=2), "", nodes=3)
cluster.shutdown()
print("all stages are where they should be")
"""


@pytest.mark.slow
def test_stages_follow_each_other_on_nodes_and_in_racks() -> None:
    command = [sys.executable, "-c", FOUR_NODES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert "all stages are where they should be" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "stages change" not in done.stderr
