"""The multi-rank pipeline under any launcher: micro-batches and results travel over the control sockets."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NoReturn

import msgspec

from ...conf.clusters import ClusterConfig
from ...conf.errors import ConfigError
from ...conf.schema import HardwareConfig, ParallelConfig
from ...conf.structured_outputs import StructuredOutputs
from ...parallel.control import ControlServer
from ...parallel.real_placement import Place
from ..core.messages import Compile, Compiled, MicroBatchMessage, MicroBatchResult, RankFailure, Stop
from ..core.run_record import FaultReason, FaultRecord
from ..core.stage_floor import StageMachine
from . import waits
from .decode_rate import measure_decode_rate
from .handshake import Halt, Present, Ready, Rejoin, RollCall, Setup, StartPart, encoder, from_rank
from .launcher import Launcher
from .protocol import PipelineError, PipelineFault, WallClock
from .recovery_limit import RecoveryLimit
from .repair import Repair
from .sampled_shares import SampledShares
from .start_parts import READY, StartParts
from .start_warnings import say_attention, warn_of_fallback, warn_of_placement, warn_of_slow_ranks

_log = logging.getLogger(__name__)


class RemotePipeline:
    """Starts the ranks through a launcher and has them build their stages; then acts as a `Pipeline`.

    `fewer_stages` makes the setup for a smaller number of stages, or raises `ConfigError` if the model does not fit. If
    a node is lost and the launcher has no other place for its ranks, the remaining stages take over its layers.

    Raises:
        PipelineError: a rank failed to start, died or hung; the text is that rank's own error.
    """

    def __init__(
        self,
        launcher: Launcher,
        parallel: ParallelConfig,
        hardware: HardwareConfig,
        cluster: ClusterConfig,
        setup: Setup,
        on_progress: Callable[[str], None] = lambda text: None,
        fewer_stages: Callable[[int], Setup] | None = None,
    ) -> None:
        self.clock = WallClock()
        self.num_stages = self._started_stages = parallel.pp
        self.depth = setup.depth
        self.looks_ahead = False
        self.num_blocks = setup.num_blocks
        self._parallel = parallel
        self._launcher = launcher
        self._fewer_stages = fewer_stages
        self._outstanding = 0
        self._shares = SampledShares()
        self._last_progress = self.clock.now()
        self._submitted: dict[int, float] = {}  # time by micro-batch in flight
        self._compiling: dict[int, Callable[[], None]] = {}  # callbacks by number
        self._numbers = itertools.count()
        self._longest_pass_s = 0.0  # longest time of a micro-batch through all stages so far
        self._launcher_checked = self.clock.now()
        self._num_done = [0] * parallel.pp  # micro-batches that each stage has computed
        self._closed = False
        self._dead: set[int] = set()  # of the last fault raised
        self._limit = RecoveryLimit(parallel.max_recoveries, parallel.recovery_window_s)
        self._repair: Repair | None = None
        self._parts = StartParts(self.clock.now())
        self.where: list[str] = []
        self.machines: list[StageMachine] = []
        self._server = ControlServer(parallel.host, parallel.world_size, secrets.token_hex(16))
        if not ipaddress.ip_address(self._server.endpoint.host).is_loopback:
            _warn_of_open_ports(parallel.host)
        try:
            launcher.start(self._server.endpoint, parallel, hardware, cluster)
            self._setup, hosts = self._build(setup, hardware, on_progress)
            places = launcher.places() or {rank: Place(node) for rank, node in self._server.node.items()}
            warn_of_placement(places, hosts, parallel, hardware, cluster)
        except BaseException:
            self.close(graceful=False)
            raise

    def _build(
        self, setup: Setup, hardware: HardwareConfig, on_progress: Callable[[str], None]
    ) -> tuple[Setup, dict[int, str]]:
        """Wait for all ranks to join, publish the setup, and wait until they have built their stages.

        Returns:
            The setup, and the name of each rank's node.
        """
        begin = self.clock.now()
        self._parts = StartParts(begin)
        world = self._parallel.world_size
        num_started = -1
        while not self._accept(waits.POLL_S):
            self._check_launcher()
            self._check_signs(self._ranks - self._server.connected, "did not start within")
            if num_started != len(self._server.connected):
                num_started = len(self._server.connected)
                on_progress(f"{num_started} of {world} ranks started")
        setup = self._with_nodes(setup)
        self._server.publish(encoder.encode(setup))
        on_progress("ranks load their shards")
        ready: dict[int, Ready] = {}
        while len(ready) < world:
            ready |= {m.rank: m for m in self._poll(waits.POLL_S) if isinstance(m, Ready)}
            self._check_launcher()
            self._check_signs(self._ranks - ready.keys(), "did not connect and load within")
        if parts := self._parts.slowest():
            on_progress(f"{READY} {self.clock.now() - begin:.1f} s; the slowest of each part: {parts}")
        self.where = [f"{ready[rank].host} {ready[rank].process}" for rank in range(world)]
        self.machines = [ready[rank].machine for rank in range(0, world, self._parallel.tp)]
        measure = partial(measure_decode_rate, self, setup.num_groups) if hardware.device == "cpu" else None
        warn_of_fallback(tuple(ready[rank].fallback_reason for rank in range(world)), measure)
        self._longest_pass_s = 0.0  # a chunk may take far longer than the decodes just measured
        say_attention(tuple(ready[rank].attention for rank in range(world)))
        warn_of_slow_ranks(tuple(ready[rank].is_slow for rank in range(world)))
        return setup, {rank: ready[rank].host for rank in range(world)}

    @property
    def _ranks(self) -> set[int]:
        return set(range(self._parallel.world_size))

    def _with_nodes(self, setup: Setup) -> Setup:
        """Return the setup with the number of ranks on each rank's node."""
        node = self._server.node
        nodes = list(node.values())
        return msgspec.structs.replace(setup, node_ranks=[nodes.count(node[rank]) for rank in sorted(node)])

    def _accept(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a rank to join (a sign of life). Return whether all have joined."""
        num_joined = len(self._server.connected)
        are_all = self._server.accept(timeout)
        if len(self._server.connected) > num_joined:
            self._parts.last_sign = self.clock.now()
        return are_all

    def _check_signs(self, ranks: set[int], what: str) -> None:
        """Raise a `PipelineError` about `ranks` if no rank has given a sign of life for too long."""
        limit = self._parallel.start_timeout_s
        if self.clock.now() > self._parts.last_sign + limit:
            names = ", ".join(map(self._name, sorted(ranks)))
            parts = self._parts.of(sorted(ranks))
            text = f"{names} {what} parallel.start_timeout_s={limit:g}; raise it if that takes longer here"
            raise PipelineError(f"{text} ({parts})" if parts else text)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stage {rank // self._parallel.tp})"

    def wake_on(self, descriptor: int) -> None:
        """See `LivePipeline.wake_on`."""
        self._server.wake_on(descriptor)

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """See `Pipeline.submit`. The micro-batch is published to all ranks."""
        assert self._outstanding < self.depth
        now = self.clock.now()
        if self._outstanding == 0:
            self._last_progress = now
        self._outstanding += 1
        self._submitted[micro_batch.micro_batch] = now
        self._server.publish(encoder.encode(micro_batch))

    def compile(self, wanted: StructuredOutputs, on_done: Callable[[], None]) -> None:
        """See `LivePipeline.compile`. Done at once during a repair, since requests wait for that anyway."""
        if self._repair is not None:
            on_done()
            return
        number, world = next(self._numbers), self._parallel.world_size
        self._compiling[number] = on_done
        self._server.publish(encoder.encode(Compile(number, wanted)), to=range(world - self._parallel.tp, world))

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """See `Pipeline.wait`. During a repair it continues the repair, and returns nothing."""
        if self._repair is not None:
            self._go_on(self._repair, deadline)
            return []
        while True:
            left = deadline - self.clock.now()
            messages = self._poll(max(0.0, min(left, waits.POLL_S)))
            results = [m for m in messages if isinstance(m, MicroBatchResult)]
            compiled = [m for m in messages if isinstance(m, Compiled)]
            for each in compiled:
                self._compiling.pop(each.number, _nothing)()
            if self.clock.now() - self._launcher_checked > waits.LAUNCHER_POLL_S:
                self._check_launcher()
            if results:
                for span in (span for result in results for span in result.spans):
                    self._num_done[span.stage] += 1
                self._last_progress = now = self.clock.now()
                for result in results:
                    if result.sampled is not None:
                        self._outstanding -= 1
                        passed_s = now - self._submitted.pop(result.micro_batch)
                        self._longest_pass_s = max(self._longest_pass_s, passed_s)
                return results
            if left <= waits.POLL_S or self._server.is_woken or compiled:
                return []
            self._check_progress()

    @property
    def _is_repairable(self) -> bool:
        """Whether `restart` may repair a fault: ranks have been ready, and the user and the launcher allow it."""
        return bool(self.where and self._parallel.max_recoveries and self._launcher.can_replace)

    @property
    def _patience_s(self) -> float:
        """Hang timeout: seconds without progress. If repairable, it is shortened by the times seen so far."""
        limit = self._parallel.step_timeout_s
        if not self._is_repairable or not self._longest_pass_s:
            return limit
        return min(limit, max(waits.LEAST_HANG_S, waits.HANG_FACTOR * self._longest_pass_s))

    def _check_progress(self) -> None:
        if self._outstanding and self.clock.now() - self._last_progress > (limit := self._patience_s):
            self._raise(*self._hang(limit))

    def _raise(self, text: str, reason: FaultReason, ranks: set[int]) -> NoReturn:
        """Raise a fault of `ranks`, which a restart will replace."""
        if not self._is_repairable:
            raise PipelineError(text)
        self._dead = ranks
        raise PipelineFault(text, reason, self._last_progress if self._outstanding else self.clock.now())

    def restart(self, fault: FaultRecord) -> None:
        """See `Pipeline.restart`. Dead or unready ranks are replaced; the others halt and rejoin."""
        self._limit.count(fault.text, self.clock.now())
        ranks = self._ranks
        replaced = self._dead | (ranks - self._server.connected)
        if self._repair is not None:
            replaced |= self._repair.replaced - self._repair.ready.keys()
        self._outstanding = 0
        self._submitted.clear()
        while self._compiling:
            self._compiling.popitem()[1]()
        self._shares.clear()
        self._server.publish(encoder.encode(Halt()), to=ranks - replaced)
        self._server.replace(replaced, secrets.token_hex(16))
        self._launcher.replace(replaced, self._server.endpoint)
        now = self.clock.now()
        self._repair = Repair(fault, replaced, now)
        self._parts = StartParts(now)

    def _go_on(self, repair: Repair, deadline: float) -> None:
        """Continue the repair until it is done, `deadline` passes, or the poll is woken.

        Raises:
            PipelineFault: another fault occurred.
            PipelineError: the repair takes too long.
        """
        ranks = self._ranks
        while (left := deadline - self.clock.now()) > 0:
            timeout = min(left, waits.POLL_S)
            if repair.joined is None:
                if self._accept(min(timeout, waits.JOIN_POLL_S)):
                    repair.joined = self.clock.now()
                    self._begin_epoch(repair)
                elif self._split_anew(repair):
                    return
                timeout = 0.0
            for message in self._poll(timeout):
                if isinstance(message, Ready):
                    repair.take(message)
                elif isinstance(message, Present):
                    repair.present.add(message.rank)
            self._check_launcher()
            now = self.clock.now()
            if len(repair.ready) == len(ranks):
                self._finish(repair, now)
                return
            stuck = ranks - repair.replaced - repair.present
            if stuck and repair.joined is not None and now > repair.joined + waits.REJOIN_S:
                names = ", ".join(map(self._name, sorted(stuck)))
                self._raise(f"{names} did not leave a failed pipeline", "hang", stuck)
            self._check_signs(ranks - repair.ready.keys(), f"did not recover ({repair.fault.text}) within")
            if self._server.is_woken:
                return

    def _split_anew(self, repair: Repair) -> bool:
        """Continue with fewer stages if ranks have had no place for too long. Return whether this was done.

        Raises:
            PipelineError: the model does not fit into fewer stages.
        """
        now, after, tp = self.clock.now(), self._parallel.resplit_after_s, self._parallel.tp
        if after is None or self._fewer_stages is None or now < repair.looked + waits.PLACES_POLL_S:
            return False
        repair.looked = now
        if not (unplaced := self._launcher.unplaced()):
            repair.unplaced_since = None
            return False
        if repair.unplaced_since is None:
            repair.unplaced_since = now
        lost = {rank // tp for rank in unplaced}
        if now < repair.unplaced_since + after or len(lost) == self.num_stages:
            return False
        left = [rank for rank in sorted(self._ranks) if rank // tp not in lost]
        try:
            setup = self._fewer_stages(self.num_stages - len(lost))
        except ConfigError as error:
            names = ", ".join(map(self._name, sorted(unplaced)))
            text = f"the cluster has no room for {names}, and the model does not fit into fewer stages: {error}"
            raise PipelineError(text) from error
        _warn_of_fewer_stages(sorted(unplaced), after, setup.pp)
        self._server.publish(encoder.encode(Stop()))
        self._server.renumber(len(left), secrets.token_hex(16))
        self._parallel = replace(self._parallel, pp=setup.pp, layers=None, stage_speeds=None)
        self._launcher.keep(left, self._server.endpoint, self._parallel)
        self._setup, self._dead = setup, set()
        self.num_stages, self.num_blocks = setup.pp, setup.num_blocks
        self.where, self.machines = [""] * len(left), [StageMachine()] * setup.pp
        self._repair = Repair(repair.fault, self._ranks, repair.stopped)
        self._repair.looked = now
        self._parts = StartParts(now)
        return True

    def _begin_epoch(self, repair: Repair) -> None:
        """Have all ranks connect to each other: surviving ranks rejoin, replaced ranks get the setup."""
        epoch = repair.fault.epoch
        self._setup = self._with_nodes(msgspec.structs.replace(self._setup, epoch=epoch))
        self._server.publish(encoder.encode(self._setup), to=repair.replaced)
        living = self._ranks - repair.replaced
        self._server.publish(encoder.encode(Rejoin(epoch)), to=living)

    def _finish(self, repair: Repair, now: float) -> None:
        for rank, ready in repair.ready.items():
            self.where[rank] = f"{ready.host} {ready.process}"
        repair.finish(now, None if self.num_stages == self._started_stages else self.num_stages)
        self._repair = None
        self._num_done = [0] * self.num_stages
        self._last_progress = now

    def _hang(self, limit: float) -> tuple[str, FaultReason, set[int]]:
        """Return which stage hangs: the stage of ranks that miss a roll call, else the first that lags behind."""
        tp = self._parallel.tp
        ranks = self._silent_ranks()
        stage = ranks[0] // tp if ranks else min(range(self.num_stages), key=self._num_done.__getitem__)
        silent = " without an answer" if ranks else ""
        ranks = ranks or list(range(stage * tp, stage * tp + tp))
        who = "; ".join(f"rank {rank}{silent}, {self.where[rank]}" for rank in ranks)
        if limit == self._parallel.step_timeout_s:
            within = f"parallel.step_timeout_s={limit:g}; raise it if a micro-batch may take longer"
        else:
            within = f"{limit:.0f} s, while micro-batches took at most {self._longest_pass_s:.3g} s"
        return f"stage {stage} hangs ({who}): no progress within {within}", "hang", set(ranks)

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that do not answer a roll call."""
        self._server.publish(encoder.encode(RollCall()))
        silent = self._ranks
        deadline = self.clock.now() + waits.ROLL_CALL_S
        while silent and self.clock.now() < deadline:
            silent -= {m.rank for m in self._poll(waits.POLL_S) if isinstance(m, Present)}
        return sorted(silent)

    def _poll(self, timeout: float) -> list[Ready | MicroBatchResult | Compiled | Present]:
        """Return what the ranks have sent within `timeout` seconds, except reports of their startup."""
        messages: list[Ready | MicroBatchResult | Compiled | Present] = []
        failures: dict[int, RankFailure | None] = {}
        for rank, payload in self._server.poll(timeout):
            message = None if payload is None else from_rank.decode(payload)
            if isinstance(message, RankFailure) and message.secondary and self._repair is not None:
                continue  # it has disconnected, and waits for `Rejoin`
            if message is None or isinstance(message, RankFailure):
                failures.setdefault(rank, message)
                continue
            self._parts.last_sign = self.clock.now()
            if isinstance(message, MicroBatchResult):
                if (result := self._shares.take(rank, self._on_our_clock(rank, message))) is not None:
                    messages.append(result)
            elif isinstance(message, StartPart):
                self._parts.take(message)
            else:
                messages.append(message)
        if failures:
            self._fail(failures)
        return messages

    def _on_our_clock(self, rank: int, result: MicroBatchResult) -> MicroBatchResult:
        offset = self._server.clock_offset[rank]
        if offset == 0.0:
            return result
        names = ("ready", "input", "begin", "end", "sent")
        spans = [
            msgspec.structs.replace(span, **{name: getattr(span, name) - offset for name in names})
            for span in result.spans
        ]
        return MicroBatchResult(result.epoch, result.micro_batch, spans, result.sampled)

    def _check_launcher(self) -> None:
        self._launcher_checked = self.clock.now()
        if gone := self._launcher.poll():
            self._fail(dict.fromkeys(gone))

    def _fail(self, failures: dict[int, RankFailure | None]) -> NoReturn:
        """Raise the error of the rank that caused `failures`, which need not be the first reported.

        A rank that lost its connection to the coordinator has exited. If a restart can repair that, there is no need to
        wait for the launcher to report how it exited.
        """
        is_repairable = self._is_repairable
        deadline = time.monotonic() + (waits.REPAIRABLE_CAUSE_S if is_repairable else waits.CAUSE_S)
        gone: dict[int, str] = {}
        while time.monotonic() < deadline:
            if any(f is not None and not f.secondary for f in failures.values()):
                break
            gone = self._launcher.poll()
            if is_repairable and None in failures.values():
                break
            if any(f is None for f in failures.values()) and set(gone) & {r for r, f in failures.items() if f is None}:
                break
            for other, payload in self._server.poll(0.05):
                message = None if payload is None else from_rank.decode(payload)
                if message is None:
                    failures.setdefault(other, None)
                elif isinstance(message, RankFailure):
                    failures[other] = message
        dead = {r for r, f in failures.items() if f is None or not f.secondary} | set(gone)
        reason, text = self._verdict(failures, gone)
        self._raise(text, reason, dead)

    def _verdict(self, failures: dict[int, RankFailure | None], gone: dict[int, str]) -> tuple[FaultReason, str]:
        own = [f for f in failures.values() if f is not None and not f.secondary]
        if own:
            return "error", f"{self._name(own[0].rank)} failed: {own[0].error}"
        silent = [r for r, f in failures.items() if f is None]
        if silent:
            explained = [r for r in silent if r in gone]
            rank = (explained or silent)[0]
            return "process", f"{self._name(rank)} died{': ' + gone[rank] if rank in gone else ''}"
        echo = next(f for f in failures.values() if f is not None)
        return "connection", f"{self._name(echo.rank)} failed: {echo.error}"

    def close(self, graceful: bool = True) -> None:
        """Stop all ranks and the launcher. If `graceful`, connected ranks get 5 s to exit by themselves."""
        if self._closed:
            return
        self._closed = True
        if graceful and len(self._server.connected) == self._parallel.world_size:
            self._server.publish(encoder.encode(Stop()))
            deadline = time.monotonic() + 5.0
            while self._server.connected and time.monotonic() < deadline:
                self._server.poll(0.1)
        self._server.close()
        self._launcher.stop()


def _nothing() -> None:
    """Ignore a reply that is no longer awaited, because of a restart."""


def _warn_of_fewer_stages(unplaced: Sequence[int], seconds: float, num_stages: int) -> None:
    """Log that the pipeline continues with fewer stages."""
    ranks = f"rank{'s' * (len(unplaced) > 1)} {', '.join(map(str, unplaced))}"
    _log.warning(
        f"the cluster has had no room for {ranks} for {seconds:g} s (parallel.resplit_after_s): continuing with "
        f"{num_stages} stage{'s' * (num_stages > 1)}"
    )


@cache
def _warn_of_open_ports(host: str) -> None:
    """Log once that this host's ranks can be reached from outside."""
    _log.warning(
        f"parallel.host={host}: ranks exchange activations unencrypted, on ports without authentication; "
        "docs/cluster.md lists them, and how to restrict access"
    )
