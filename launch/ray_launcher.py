"""Ranks as Ray actors: Ray places, starts, watches and ends them; steps and activations go past it."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..conf.errors import ConfigError
from ..conf.schema import HardwareConfig, ParallelConfig
from ..parallel.control import Endpoint
from ..runtime.pipeline.protocol import PipelineError

# Ray's usage reports, its habit of rebuilding the environment under `uv run`, and that of running its workers at a
# niceness of 15, where a stage would give way to every other process of its node.
_RAY_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RankActor:
    """One rank's process. It may serve again after a run has ended."""

    def run(self, endpoint: Endpoint, rank: int, device: str, timeout_s: float) -> None:
        from ..runtime.pipeline.rank import run_rank

        run_rank(endpoint, rank, device, timeout_s)


class RayLauncher:
    """Places one bundle per stage, so that the ranks of a stage share a node, with one actor per rank.

    Without `parallel.ray_address` (or Ray's own `RAY_ADDRESS`) it starts Ray on this machine, on loopback, and ends it
    again. With `keep=True` actors and Ray outlive `stop` and serve the next `start`, until `shutdown`.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # reference of an actor's run: its rank
        self._ended: dict[int, str] = {}
        self._group: Any = None
        self._owns_ray = False

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        """Check that something listens at a given address; Ray itself takes minutes to find that nothing does."""
        address = parallel.ray_address or os.environ.get("RAY_ADDRESS", "")
        host, _, port = address.rpartition(":")
        if host and "/" not in host and port.isdigit():
            try:
                socket.create_connection((host, int(port)), timeout=10.0).close()
            except OSError as error:
                raise ConfigError(f"parallel.ray_address={address}: nothing answers there ({error})") from error

    def start(self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        uses_gpu = hardware.device == "cuda"
        self._connect(parallel)
        if len(self._actors) < parallel.world_size:
            self._end_actors()
            self._place(parallel, uses_gpu)
            self._check_reach(endpoint)
        device = "cuda:0" if uses_gpu else "cpu"  # an actor with one GPU sees that one only
        self._ended = {}
        self._runs = {
            actor.run.remote(endpoint, rank, device, parallel.start_timeout_s): rank
            for rank, actor in enumerate(self._actors[: parallel.world_size])
        }

    def _connect(self, parallel: ParallelConfig) -> None:
        address = parallel.ray_address or os.environ.get("RAY_ADDRESS")
        os.environ.update({k: v for k, v in _RAY_ENV.items() if k not in os.environ})
        import ray

        if self._owns_ray and ray.cluster_resources().get("CPU", 0) < parallel.world_size:
            self.shutdown()  # it was started for fewer ranks
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        on_term = signal.getsignal(signal.SIGTERM)
        try:
            if address:
                ray.init(address=address, **options)
            else:
                cpus = max(os.cpu_count() or 1, parallel.world_size)
                with _loopback():
                    ray.init(
                        address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **options
                    )
        except (ConnectionError, ray.exceptions.RayError) as error:
            # Ray shows its token to a given address in this mode only; that is for the user to decide.
            hint = "" if os.environ.get("RAY_AUTH_MODE") == "token" else "; if it wants a token: RAY_AUTH_MODE=token"
            raise ConfigError(
                f"parallel.ray_address={address}: no Ray cluster lets us in there ({error}){hint}"
            ) from error
        self._owns_ray = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)  # Ray puts a handler of its own in its place

    def _place(self, parallel: ParallelConfig, uses_gpu: bool) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": float(parallel.tp)} | ({"GPU": float(parallel.tp)} if uses_gpu else {})
        self._check_resources(bundle, parallel.pp)
        self._group = placement_group([bundle] * parallel.pp, strategy="SPREAD")
        if not self._group.wait(timeout_seconds=parallel.start_timeout_s):
            raise PipelineError(
                f"Ray could not place {parallel.pp} stages of {_text(bundle)} each within "
                f"parallel.start_timeout_s={parallel.start_timeout_s:g}: is the cluster busy?"
            )
        actor = ray.remote(num_cpus=1, num_gpus=1 if uses_gpu else 0, max_restarts=0)(RankActor)
        env = {} if uses_gpu else {"TORCHDYNAMO_DISABLE": "1"}
        for rank in range(parallel.world_size):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank // parallel.tp
            )
            options = {"scheduling_strategy": strategy, "runtime_env": {"env_vars": env}}
            self._actors.append(actor.options(**options).remote())

    def _check_reach(self, endpoint: Endpoint) -> None:
        """Check that no rank is on another node, where the coordinator listens on loopback."""
        import ray
        from ray.util import placement_group_table

        if not ipaddress.ip_address(endpoint.host).is_loopback:
            return
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        ours = address.get(ray.get_runtime_context().get_node_id())
        placed = set(placement_group_table(self._group)["bundles_to_node_id"].values())
        if others := sorted({address[node] for node in placed} - {ours}):
            raise ConfigError(
                f"parallel.host={endpoint.host}: the ranks on {', '.join(others)} cannot reach the coordinator there; "
                f"set parallel.host to this node's address ({ours})"
            )

    @staticmethod
    def _check_resources(bundle: dict[str, float], stages: int) -> None:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(min(int(node.get(k, 0) // v) for k, v in bundle.items()) for node in nodes)
        if fitting < stages:
            has = ", ".join(_text({k: node.get(k, 0.0) for k in bundle}) for node in nodes)
            raise ConfigError(
                f"parallel.pp={stages}: each stage needs a node with {_text(bundle)}, and the cluster's "
                f"{len(nodes)} nodes ({has}) have room for {fitting}"
            )

    def poll(self) -> dict[int, str]:
        import ray

        done, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        for ref in done:
            rank = self._runs.pop(ref)
            try:
                ray.get(ref)
                self._ended[rank] = "it ended before the run did"
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None) or error
                self._ended[rank] = f"{type(cause).__name__}: {cause}".splitlines()[0]
            except ray.exceptions.RayActorError:
                self._ended[rank] = "its process was killed or crashed"
            except ray.exceptions.RayError as error:
                self._ended[rank] = str(error).strip().splitlines()[0]
        return self._ended

    def stop(self) -> None:
        if not self._keep:
            self.shutdown()
        elif not self._settled():
            self._end_actors()

    def _settled(self) -> bool:
        """Return whether all actors are idle again, and so can serve the next start."""
        import ray

        if not self._runs:
            return not self._ended
        done, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=5.0)
        if len(done) < len(self._runs):
            return False
        try:
            ray.get(done)
        except ray.exceptions.RayError:
            return False
        self._runs = {}
        return True

    def shutdown(self) -> None:
        """End the actors, and Ray if it was started here."""
        if not self._actors and not self._owns_ray:
            return
        import ray

        self._end_actors()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _end_actors(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor, no_restart=True)
            if self._group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(self._group)
        self._actors, self._runs, self._group = [], {}, None


@contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray listen on loopback alone.

    Where it may become part of a cluster, Ray takes this machine's address for 127.0.0.1, and all its processes listen
    on all addresses.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _text(resources: dict[str, float]) -> str:
    return " and ".join(f"{v:g} {k}" for k, v in resources.items())
