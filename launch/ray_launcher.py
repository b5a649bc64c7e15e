"""Runs ranks as Ray actors. Ray places, starts, watches and stops them; micro-batches do not go through Ray."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import threading
from collections.abc import Collection, Sequence
from typing import Any

from ..conf.clusters import ClusterConfig
from ..conf.errors import ConfigError
from ..conf.schema import HardwareConfig, ParallelConfig
from ..kernels import cores
from ..parallel.control import Endpoint
from ..parallel.real_placement import Place, in_order, stages_together
from ..runtime.pipeline.protocol import PipelineError
from .joined_ray import JoinedRay
from .local_ray import LocalRay, init_options
from .ray_address import check_address
from .stderr_log import messages_on_stderr

_log = logging.getLogger(__name__)
_RAY_ENV = {
    "RAY_worker_niceness": "0",  # Ray's default 15 would yield to every other process
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else Ray rebuilds the environment under `uv run`
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns and hides all GPUs from actors without GPUs
}
# Task events are unused, and would be sent to a dead GCS for 5 s.
_LOCAL_RAY_ENV = {"RAY_task_events_report_interval_ms": "0"}

_ROOM_S = 5.0  # timeout of placing several stages per node; then stages are placed individually
_RACK = "rack"  # Ray node label with the rack name


class RankActor:
    """The process of a rank, reusable after a run."""

    def place(self) -> tuple[str, int]:
        """Return this actor's node id and process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def warm_up(self) -> None:
        """Import everything a rank needs."""
        from ..runtime.pipeline.rank import warm_up

        warm_up()

    def run(self, endpoint: Endpoint, rank: int, device: str, timeout_s: float) -> None:
        """Serve one run as `rank`. Arguments as in `run_rank`."""
        from ..runtime.pipeline.rank import run_rank

        with messages_on_stderr():
            run_rank(endpoint, rank, device, timeout_s)


class RayLauncher:
    """Places the ranks of a stage on one node, and consecutive stages on one node or in one rack.

    Each rank is an actor. A bundle of the placement group has one stage; on GPUs it has as many consecutive stages as
    fit on a node with `cluster.devices_per_node`. CPU stages are spread over the nodes, as the ranks of a node share
    its cores.

    Without `parallel.ray_address` (or `RAY_ADDRESS`) it starts Ray on this machine, on loopback, and stops it at the
    end. With `keep=True` actors and Ray survive `stop` and serve the next `start`, until `shutdown`.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # rank by reference of an actor's run
        self._ended: dict[int, str] = {}  # how a rank ended, by rank
        self._places: dict[Any, Any] = {}  # reference of `place`, by actor
        self._bundles: dict[Any, int] = {}  # bundle of the placement group, by actor
        self._spares: list[Any] = []
        self._unused: set[int] = set()  # ranks whose actors have no run yet, after Ray was restarted
        self._parallel: ParallelConfig | None = None
        self._cluster = ClusterConfig()
        self._uses_gpu = False
        self._group: Any = None
        self._connected = False  # whether this launcher has connected to Ray and must disconnect
        self._ray: LocalRay | JoinedRay | None = None  # the Ray that this launcher has connected to
        self._lost: tuple[JoinedRay, set[int], Endpoint] | None = None  # with the ranks to restart on its return

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        """Check that Ray responds at a given address."""
        check_address(parallel.ray_address or os.environ.get("RAY_ADDRESS", ""))

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        """See `Launcher.start`. Actors of an earlier run are reused if there are enough."""
        uses_gpu = hardware.device == "cuda"
        self._connect(parallel)
        if len(self._actors) < parallel.world_size or len(self._spares) < parallel.spares:
            self._end_actors()
            self._place(parallel, cluster, uses_gpu)
            self._check_reach(endpoint)
        self._parallel, self._cluster, self._uses_gpu = parallel, cluster, uses_gpu
        self._unused, self._lost = set(), None
        self._ended = {}
        self._runs = {}
        for rank in range(parallel.world_size):
            self._run(rank, endpoint)

    def places(self) -> dict[int, Place]:
        """See `Launcher.places`. Read from Ray's placement group."""
        assert self._parallel is not None
        where = self._places_of_bundles()
        return {rank: where[self._bundles[self._actors[rank]]] for rank in range(self._parallel.world_size)}

    def _run(self, rank: int, endpoint: Endpoint) -> None:
        assert self._parallel is not None
        device = "cuda:0" if self._uses_gpu else "cpu"  # an actor with one GPU sees that one only
        run = self._actors[rank].run.remote(endpoint, rank, device, self._parallel.start_timeout_s)
        self._runs[run] = rank

    @property
    def can_replace(self) -> bool:
        """True: a new or spare actor can replace a rank."""
        return True

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        """Kill `ranks` and start replacements: spares first, then new actors.

        For each spare used, a new spare starts in the bundle of the dead rank. If a Ray that was started here has died,
        it is restarted first, which ends all ranks. An existing cluster that was joined is waited for.
        """
        if self._ray is not None and (fault := self._ray.fault):
            if isinstance(self._ray, LocalRay):
                self._start_ray_again(fault)
            else:
                assert self._parallel is not None
                limit = f"parallel.start_timeout_s={self._parallel.start_timeout_s:g}"
                _log.warning(f"{fault}; waiting for Ray to return at {self._ray.gcs}, up to {limit}")
                self._lost = self._ray, set(), endpoint
                self.shutdown()
        if self._lost is not None:
            self._lost = self._lost[0], self._lost[1] | set(ranks), endpoint
            return
        try:
            for rank in sorted(ranks):
                self._replace(rank, endpoint)
        except Exception as error:
            if not isinstance(self._ray, LocalRay):
                raise
            self._start_ray_again(f"Ray on this machine has failed ({error})")  # one of its processes is dying
            for rank in sorted(ranks):
                self._replace(rank, endpoint)

    def _replace(self, rank: int, endpoint: Endpoint) -> None:
        if rank in self._unused:
            self._unused.discard(rank)
        else:
            dead = self._actors[rank]
            self._kill(dead)
            self._runs = {run: of for run, of in self._runs.items() if of != rank}
            self._ended.pop(rank, None)
            new = self._new_actor(self._bundles.pop(dead))
            if self._spares:
                self._actors[rank] = self._spares.pop(0)
                new.warm_up.remote()
                self._spares.append(new)
            else:
                self._actors[rank] = new
        self._run(rank, endpoint)

    def _start_ray_again(self, fault: str) -> None:
        """Clean up a dead local Ray, and place all ranks on a new one.

        Raises:
            PipelineError: Ray does not start.
        """
        try:
            self.shutdown()
            self._place_all()
        except Exception as error:
            raise PipelineError(f"{fault}, and could not be restarted: {error}") from error

    def _place_all(self) -> None:
        """Connect to a Ray without our actors, and place all ranks."""
        assert self._parallel is not None
        self._connect(self._parallel)
        self._place(self._parallel, self._cluster, self._uses_gpu)
        self._ended, self._unused = {}, set(range(self._parallel.world_size))

    def _join_again(self, lost: JoinedRay, ranks: set[int], endpoint: Endpoint) -> None:
        """Restart `ranks` on the lost Ray, if it is back and has room for all."""
        if not lost.is_back:
            return
        try:
            self._place_all()
        except Exception as error:
            _log.debug(f"Ray at {lost.gcs} is not back yet: {error}")
            self.shutdown()
            return
        self._lost = None
        for rank in sorted(ranks):
            self._replace(rank, endpoint)

    def unplaced(self) -> set[int]:
        """See `Launcher.unplaced`. A rank has no place if its bundle is on no live node."""
        import ray
        from ray.util import placement_group_table

        if self._lost is not None:
            return set()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        return {rank for rank, actor in enumerate(self._actors) if node_of.get(self._bundles[actor]) not in alive}

    def keep(self, ranks: Sequence[int], endpoint: Endpoint, parallel: ParallelConfig) -> None:
        """See `Launcher.keep`. A kept actor starts its next run when the previous one has ended."""
        for rank in set(range(len(self._actors))) - set(ranks):
            self._kill(self._actors[rank])
            del self._bundles[self._actors[rank]]
        self._actors = [self._actors[rank] for rank in ranks]
        self._parallel, self._runs, self._ended = parallel, {}, {}
        for rank in range(len(ranks)):
            self._run(rank, endpoint)

    def _kill(self, actor: Any) -> None:
        """Kill an actor's process, even if it is suspended and does not respond to Ray."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)
        place = self._places.pop(actor)
        ready, _ = ray.wait([place], timeout=0)
        if not ready:
            return
        with contextlib.suppress(Exception):
            node, process = ray.get(place)
            if node == ray.get_runtime_context().get_node_id():
                os.kill(process, signal.SIGKILL)
            else:
                there = NodeAffinitySchedulingStrategy(node, soft=False)  # process ids are local to a node
                ray.remote(os.kill).options(scheduling_strategy=there, num_cpus=0).remote(process, signal.SIGKILL)

    def _connect(self, parallel: ParallelConfig) -> None:
        address = parallel.ray_address or os.environ.get("RAY_ADDRESS")
        env = _RAY_ENV if address else _RAY_ENV | _LOCAL_RAY_ENV
        os.environ.update({k: v for k, v in env.items() if k not in os.environ})
        import ray

        has_died = self._ray is not None and self._ray.fault
        if has_died or (
            self._connected and ray.cluster_resources().get("CPU", 0) < parallel.world_size + parallel.spares
        ):
            self.shutdown()  # may have been started for fewer ranks
        if ray.is_initialized():
            return
        on_term = signal.getsignal(signal.SIGTERM)
        try:
            if address:
                ray.init(address=address, **init_options())
                self._ray = None if ray.util.client.ray.is_connected() else JoinedRay()
            else:
                self._ray = LocalRay(max(cores.threads(), parallel.world_size + parallel.spares))
        except (ConnectionError, ray.exceptions.RayError) as error:
            # Ray sends its token to a given address only in this mode, which is the user's decision.
            hint = (
                ""
                if os.environ.get("RAY_AUTH_MODE") == "token"
                else "; if it requires a token, set RAY_AUTH_MODE=token"
            )
            raise ConfigError(f"parallel.ray_address={address}: cannot join the Ray cluster ({error}){hint}") from error
        self._connected = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)  # Ray replaces it

    def _place(self, parallel: ParallelConfig, cluster: ClusterConfig, uses_gpu: bool) -> None:
        import ray

        pp, tp = parallel.pp, parallel.tp
        per_rank = {"CPU": 1.0} | ({"GPU": 1.0} if uses_gpu else {})
        per_stage = {name: amount * tp for name, amount in per_rank.items()}
        self._check_resources(per_stage, pp)
        self._uses_gpu = uses_gpu
        together = [1]  # numbers of stages per bundle to try, descending
        if uses_gpu:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            ranks_that_fit = [min(int(node.get(name, 0)) for name in per_rank) for node in nodes]
            together = stages_together(pp, tp, cluster.devices_per_node, ranks_that_fit)
        while not self._reserve(together[0], parallel, per_stage, per_rank):
            if len(together) == 1:
                raise PipelineError(
                    f"Ray could not place {pp} stages of {_text(per_stage)} each within "
                    f"parallel.start_timeout_s={parallel.start_timeout_s:g}: is the cluster busy?"
                )
            del together[0]
        bundle_of = self._order(pp, together[0])
        self._actors = [self._new_actor(bundle_of[rank // tp // together[0]]) for rank in range(parallel.world_size)]
        self._spares = [self._new_actor(len(bundle_of) + number) for number in range(parallel.spares)]
        for actor in self._spares:
            actor.warm_up.remote()

    def _reserve(
        self, together: int, parallel: ParallelConfig, stage: dict[str, float], spare: dict[str, float]
    ) -> bool:
        """Create the placement group with `together` stages per bundle. Return whether there was room."""
        from ray.util.placement_group import placement_group, remove_placement_group

        sizes = [min(together, parallel.pp - first) for first in range(0, parallel.pp, together)]
        bundles = [{name: amount * size for name, amount in stage.items()} for size in sizes]
        self._group = placement_group([*bundles, *[spare] * parallel.spares], strategy="SPREAD")
        if self._group.wait(timeout_seconds=parallel.start_timeout_s if together == 1 else _ROOM_S):
            return True
        if together > 1:
            remove_placement_group(self._group)
        return False

    def _order(self, pp: int, together: int) -> list[int]:
        """Return the bundles, of `together` stages each, in stage order.

        Bundles of one node are consecutive, and so are those of one rack. A last bundle with fewer stages stays last.
        """
        where, num_full = self._places_of_bundles(), pp // together
        last = where[num_full] if pp % together else None
        order = in_order([where[bundle] for bundle in range(num_full)], last)
        return order if last is None else [*order, num_full]

    def _places_of_bundles(self) -> dict[int, Place]:
        import ray
        from ray.util import placement_group_table

        rack_of = {node["NodeID"]: node["Labels"].get(_RACK) for node in ray.nodes()}
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        return {bundle: Place(node, rack_of.get(node)) for bundle, node in node_of.items()}

    def _new_actor(self, bundle: int) -> Any:
        """Start an actor on a bundle of the placement group. Bundles of stages precede those of spares."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = ray.remote(num_cpus=1, num_gpus=1 if self._uses_gpu else 0, max_restarts=0)(RankActor)
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle)
        env = {} if self._uses_gpu else {"TORCHDYNAMO_DISABLE": "1"}
        actor: Any = kind.options(scheduling_strategy=strategy, runtime_env={"env_vars": env}).remote()
        self._places[actor] = actor.place.remote()
        self._bundles[actor] = bundle
        return actor

    def _check_reach(self, endpoint: Endpoint) -> None:
        """Check that all ranks are on this node if the coordinator listens on loopback."""
        import ray
        from ray.util import placement_group_table

        if not ipaddress.ip_address(endpoint.host).is_loopback:
            return
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        ours = address.get(ray.get_runtime_context().get_node_id())
        placed = set(placement_group_table(self._group)["bundles_to_node_id"].values())
        if others := sorted({address[node] for node in placed} - {ours}):
            raise ConfigError(
                f"parallel.host={endpoint.host}: ranks on {', '.join(others)} cannot reach the coordinator there; "
                f"set parallel.host to this node's address ({ours})"
            )

    @staticmethod
    def _check_resources(bundle: dict[str, float], num_stages: int) -> None:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(min(int(node.get(k, 0) // v) for k, v in bundle.items()) for node in nodes)
        if fitting < num_stages:
            has = ", ".join(_text({k: node.get(k, 0.0) for k in bundle}) for node in nodes)
            raise ConfigError(
                f"parallel.pp={num_stages}: each stage needs a node with {_text(bundle)}, but the cluster's "
                f"{len(nodes)} nodes ({has}) fit only {fitting}"
            )

    def poll(self) -> dict[int, str]:
        """See `Launcher.poll`. If Ray itself dies, all ranks have ended."""
        import ray

        if self._lost is not None:
            self._join_again(*self._lost)
            return {}
        if self._ray is not None and (fault := self._ray.fault):
            assert self._parallel is not None
            return dict.fromkeys(range(self._parallel.world_size), fault)
        done, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        for ref in done:
            rank = self._runs.pop(ref)
            try:
                ray.get(ref)
                self._ended[rank] = "its actor returned before the end of the run"
            except ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None) or error
                self._ended[rank] = f"{type(cause).__name__}: {cause}".splitlines()[0]
            except ray.exceptions.RayActorError:
                self._ended[rank] = "its process was killed or crashed"
            except ray.exceptions.RayError as error:
                self._ended[rank] = str(error).strip().splitlines()[0]
        return self._ended

    def stop(self) -> None:
        """See `Launcher.stop`. With `keep`, actors are ended only if one does not become idle."""
        if not self._keep or (self._ray is not None and self._ray.fault):
            self.shutdown()
        elif not self._settled():
            self._end_actors()

    def _settled(self) -> bool:
        """Return whether all actors are idle again and can serve the next `start`."""
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
        """End the actors, and stop Ray if it was started here."""
        if not self._actors and not self._connected:
            return
        import ray

        found, self._ray = self._ray, None
        if found is None or (isinstance(found, JoinedRay) and not found.fault):
            self._end_actors()
        if found is not None:
            found.end()
        elif self._connected:
            ray.shutdown()
        self._forget_actors()
        self._connected = False

    def _end_actors(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            for actor in [*self._actors, *self._spares]:
                with contextlib.suppress(Exception):
                    ray.kill(actor, no_restart=True)
            if self._group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(self._group)
        self._forget_actors()

    def _forget_actors(self) -> None:
        self._actors, self._spares, self._group = [], [], None
        self._places, self._bundles, self._runs = {}, {}, {}


def _text(resources: dict[str, float]) -> str:
    return " and ".join(f"{v:g} {k}" for k, v in resources.items())
