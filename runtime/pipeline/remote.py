"""The pipeline of real ranks under any launcher: micro-batches and results travel over the control sockets."""

from __future__ import annotations

import ipaddress
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec

from ...conf.schema import HardwareConfig, ParallelConfig
from ...parallel.control import ControlServer
from ...parallel.placement import split_stages
from ..core.messages import MicroBatchMessage, MicroBatchResult, RankFailure, Span, Stop
from .handshake import Present, Ready, RollCall, Setup, encoder, from_rank
from .launcher import Launcher
from .protocol import PipelineError, WallClock

_POLL_INTERVAL_S = 0.2
_LAUNCHER_INTERVAL_S = 0.5
_ROLL_CALL_S = 2.0
_CAUSE_TIMEOUT_S = 2.0  # wait for the cause of a failure: the neighbours of a dead rank often report first


class RemotePipeline:
    """Starts the ranks through a launcher and has them build their stages; a `Pipeline` from then on.

    Raises:
        PipelineError: a rank failed to start, died or hung; the text is that rank's own error.
    """

    def __init__(
        self,
        launcher: Launcher,
        parallel: ParallelConfig,
        hardware: HardwareConfig,
        setup: Setup,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.clock = WallClock()
        self.num_stages = parallel.pp
        self.depth = setup.depth
        self.num_blocks = setup.num_blocks
        self._parallel = parallel
        self._launcher = launcher
        self._outstanding = 0
        self._last_progress = self.clock.now()
        self._launcher_checked = self.clock.now()
        self._num_done = [0] * parallel.pp  # micro-batches that each stage has computed
        self._closed = False
        self._server = ControlServer(parallel.host, parallel.world_size, secrets.token_hex(16))
        if not ipaddress.ip_address(self._server.endpoint.host).is_loopback:
            _warn_of_open_ports(parallel.host)
        try:
            launcher.start(self._server.endpoint, parallel, hardware)
            self.where = self._build(setup, on_progress)
        except BaseException:
            self.close(graceful=False)
            raise

    def _build(self, setup: Setup, on_progress: Callable[[str], None]) -> list[str]:
        """Wait for all ranks to join, publish the setup, wait until they have built their stages."""
        deadline = self.clock.now() + self._parallel.start_timeout_s
        world = self._parallel.world_size
        while not self._server.accept(_POLL_INTERVAL_S):
            self._check_launcher()
            if self.clock.now() > deadline:
                raise self._late(set(range(world)) - self._server.connected, "did not start within")
            on_progress(f"{len(self._server.connected)} of {world} ranks started")
        nodes = list(self._server.node.values())
        setup = msgspec.structs.replace(
            setup, node_ranks=[nodes.count(self._server.node[rank]) for rank in range(world)]
        )
        self._server.publish(encoder.encode(setup))
        on_progress("ranks load their shards")
        ready: dict[int, Ready] = {}
        while len(ready) < world:
            ready |= {m.rank: m for m in self._poll(_POLL_INTERVAL_S) if isinstance(m, Ready)}
            self._check_launcher()
            if self.clock.now() > deadline:
                raise self._late(set(range(world)) - ready.keys(), "did not connect and load within")
        if split := split_stages(self._server.node, setup.tp):
            _warn_of_split_stages({stage: [ready[rank].host for rank in ranks] for stage, ranks in split.items()})
        return [f"{ready[rank].host} {ready[rank].process}" for rank in range(world)]

    def _late(self, ranks: set[int], what: str) -> PipelineError:
        limit = self._parallel.start_timeout_s
        names = ", ".join(map(self._name, sorted(ranks)))
        return PipelineError(
            f"{names} {what} parallel.start_timeout_s={limit:g}; raise it if that takes longer here"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (stage {rank // self._parallel.tp})"

    def wake_on(self, descriptor: int) -> None:
        self._server.wake_on(descriptor)

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        assert self._outstanding < self.depth
        if self._outstanding == 0:
            self._last_progress = self.clock.now()
        self._outstanding += 1
        self._server.publish(encoder.encode(micro_batch))

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        while True:
            left = deadline - self.clock.now()
            messages = self._poll(max(0.0, min(left, _POLL_INTERVAL_S)))
            results = [m for m in messages if isinstance(m, MicroBatchResult)]
            if self.clock.now() - self._launcher_checked > _LAUNCHER_INTERVAL_S:
                self._check_launcher()
            if results:
                for span in (span for result in results for span in result.spans):
                    self._num_done[span.stage] += 1
                self._outstanding -= sum(r.sampled is not None for r in results)
                self._last_progress = self.clock.now()
                return results
            if left <= _POLL_INTERVAL_S or self._server.is_woken:
                return []
            self._check_progress()

    def _check_progress(self) -> None:
        if self._outstanding and self.clock.now() - self._last_progress > self._parallel.step_timeout_s:
            raise PipelineError(self._hang())

    def _hang(self) -> str:
        """Say which stage hangs: that of the ranks that answer nothing, else the first one behind the others."""
        tp = self._parallel.tp
        ranks = self._silent_ranks()
        stage = ranks[0] // tp if ranks else min(range(self.num_stages), key=self._num_done.__getitem__)
        silent = " without an answer" if ranks else ""
        ranks = ranks or list(range(stage * tp, stage * tp + tp))
        who = "; ".join(f"rank {rank}{silent}, {self.where[rank]}" for rank in ranks)
        limit = self._parallel.step_timeout_s
        return (
            f"stage {stage} hangs ({who}): no progress within parallel.step_timeout_s={limit:g}; "
            "raise it if a micro-batch may take longer"
        )

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that do not answer a roll call."""
        self._server.publish(encoder.encode(RollCall()))
        silent = set(range(self._parallel.world_size))
        deadline = self.clock.now() + _ROLL_CALL_S
        while silent and self.clock.now() < deadline:
            silent -= {m.rank for m in self._poll(_POLL_INTERVAL_S) if isinstance(m, Present)}
        return sorted(silent)

    def _poll(self, timeout: float) -> list[Ready | MicroBatchResult | Present]:
        messages: list[Ready | MicroBatchResult | Present] = []
        for rank, payload in self._server.poll(timeout):
            message = None if payload is None else from_rank.decode(payload)
            if message is None or isinstance(message, RankFailure):
                self._fail(rank, message)
            elif isinstance(message, MicroBatchResult):
                messages.append(self._on_our_clock(rank, message))
            else:
                messages.append(message)
        return messages

    def _on_our_clock(self, rank: int, result: MicroBatchResult) -> MicroBatchResult:
        offset = self._server.clock_offset[rank]
        if offset == 0.0:
            return result
        spans = [
            Span(s.micro_batch, s.stage, *(time - offset for time in (s.ready, s.input, s.begin, s.end, s.sent)))
            for s in result.spans
        ]
        return MicroBatchResult(result.epoch, result.micro_batch, spans, result.sampled)

    def _check_launcher(self) -> None:
        self._launcher_checked = self.clock.now()
        for rank in self._launcher.poll():
            self._fail(rank, None)

    def _fail(self, rank: int, failure: RankFailure | None) -> None:
        """Raise the error of the rank that caused the failure, which need not be the first that was reported."""
        failures = {rank: failure}
        deadline = time.monotonic() + _CAUSE_TIMEOUT_S
        gone: dict[int, str] = {}
        while time.monotonic() < deadline:
            if any(f is not None and not f.secondary for f in failures.values()):
                break
            gone = self._launcher.poll()
            if any(f is None for f in failures.values()) and set(gone) & {r for r, f in failures.items() if f is None}:
                break
            for other, payload in self._server.poll(0.05):
                message = None if payload is None else from_rank.decode(payload)
                if message is None:
                    failures.setdefault(other, None)
                elif isinstance(message, RankFailure):
                    failures[other] = message
        raise PipelineError(self._verdict(failures, gone))

    def _verdict(self, failures: dict[int, RankFailure | None], gone: dict[int, str]) -> str:
        own = [f for f in failures.values() if f is not None and not f.secondary]
        if own:
            return f"{self._name(own[0].rank)} failed: {own[0].error}"
        silent = [r for r, f in failures.items() if f is None]
        if silent:
            explained = [r for r in silent if r in gone]
            rank = (explained or silent)[0]
            return f"{self._name(rank)} died{': ' + gone[rank] if rank in gone else ''}"
        echo = next(f for f in failures.values() if f is not None)
        return f"{self._name(echo.rank)} failed: {echo.error}"

    def close(self, graceful: bool = True) -> None:
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


def _warn_of_split_stages(hosts_of_stage: Mapping[int, Sequence[str]]) -> None:
    """Say which stages' ranks are on several nodes, and on which."""
    stages = "; ".join(f"stage {stage} on {', '.join(hosts)}" for stage, hosts in hosts_of_stage.items())
    print(
        f"gapless: warning: stages over several nodes ({stages}): each of their all-reduces crosses the network; a "
        "smaller parallel.tp, with more stages, keeps each stage on a node",
        file=sys.stderr,
    )


@cache
def _warn_of_open_ports(host: str) -> None:
    """Say once that this host's ranks can be reached from outside."""
    print(
        f"gapless: warning: parallel.host={host}: ranks exchange activations unencrypted, on ports that let in whoever "
        "reaches them; docs/cluster.md says which, and how to close them to strangers",
        file=sys.stderr,
    )
