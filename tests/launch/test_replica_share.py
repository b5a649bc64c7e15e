"""What of a machine each replica gets: cores that all share, GPUs of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ServeConfig
from gapless.kernels import cores
from gapless.launch.compose import compose_one
from gapless.launch.server.replica_share import check_replicas, share_of


def config_of(*overrides: str) -> ServeConfig:
    return compose_one(list(overrides), ServeConfig, "serve")


def on_gpus(replicas: int, tp: int) -> ServeConfig:
    config = config_of(f"serve.replicas={replicas}", "parallel.pp=1", f"parallel.tp={tp}")
    return replace(config, hardware=replace(config.hardware, device="cuda"))


def test_replicas_have_gpus_of_their_own_in_the_order_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-3a,5,2,1,0")
    config = on_gpus(3, 2)
    check_replicas(config)
    found = [share_of(config, replica) for replica in range(3)]
    assert [own for own, _ in found] == [config] * 3
    assert [env for _, env in found] == [{"CUDA_VISIBLE_DEVICES": devices} for devices in ("7,GPU-3a", "5,2", "1,0")]
    with pytest.raises(ConfigError, match=r"4 pipelines of 2 GPUs each need 8, and this machine shows 6; .* 3 at most"):
        check_replicas(on_gpus(4, 2))


def test_replicas_on_cores_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(cores, "threads", lambda ranks: asked.append(ranks) or 3)
    config = config_of("serve.replicas=2", "parallel=pp2", "hardware.device=cpu")
    assert [share_of(config, replica)[0].parallel.threads for replica in range(2)] == [3, 3]
    assert asked == [4, 4], "two ranks of each of two replicas"
    given = config_of("serve.replicas=2", "parallel=pp2", "parallel.threads=1", "hardware.device=cpu")
    assert share_of(given, 1) == (given, {})
    alone = config_of("parallel=pp2", "hardware.device=cpu")
    assert share_of(alone, 0) == (alone, {})


def test_torchrun_starts_one_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"serve\.replicas=2: torchrun starts the ranks of one pipeline; must be 1"):
        check_replicas(config_of("serve.replicas=2", "parallel.launcher=torchrun"))
