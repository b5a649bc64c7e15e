"""`gapless serve`: an OpenAI-compatible server over one pipeline or several, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..conf.build import to_mapping
from ..conf.errors import ConfigError
from ..conf.schema import ServeConfig
from .progress import versions
from .prompts import TextInput
from .results import plain

if TYPE_CHECKING:
    from ..runtime.engine.intake import Intake
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.serving.journal import Journal
    from .server.chat_template import ChatTemplate
    from .server.journaling import Journaling
    from .server.keys import Keys
    from .server.metrics import Metrics
    from .server.service import Service

_SECOND_SIGNAL_S = 1.0  # after the first; torchrun passes on the Ctrl-C that its ranks have had already
_BACKLOG = 2048
_STALL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked server."""

    plan: Plan
    intake: Intake
    template: ChatTemplate | None
    keys: Keys


def prepare(config: ServeConfig, stdin: TextInput) -> Prepared:
    """Check a server before anything starts.

    Raises:
        ConfigError: the checkpoint or its chat template is wrong, the model does not fit, or the port is taken.
    """
    from ..runtime.engine.intake import Intake
    from ..runtime.engine.plan import make_plan
    from ..runtime.pipeline.launcher import check_launcher
    from .server.chat_template import load_chat_template
    from .server.connections import allow_files
    from .server.keys import Keys
    from .server.replica_share import check_replicas

    check_replicas(config)
    check_launcher(config.parallel, config.hardware)
    allow_files(config.serve)
    keys = Keys(config.serve.api_keys)
    plan = make_plan(config)
    _bind(config).close()
    if (journal := _open_journal(config)) is not None:
        journal.close()
    return Prepared(plan, Intake(plan), load_chat_template(plan.tokenizer), keys)


def run(config: ServeConfig, prepared: Prepared, run_dir: Path, launcher: Launcher | None = None) -> int:
    """Serve until a signal. The exit code is 0 after a drain, 1 where the engine failed.

    Raises:
        ConfigError: what the user can mend, found while the engine started.
        PipelineError: the engine failed.
    """
    return asyncio.run(_serve(config, prepared, _bind(config), run_dir))


def _bind(config: ServeConfig) -> socket.socket:
    """Open the server's port.

    Raises:
        ConfigError: it is taken, or the address is not of this machine.
    """
    host, port = config.serve.host, config.serve.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        named = f"serve.port={port}" if error.errno == errno.EADDRINUSE else f"serve.host={host}"
        raise ConfigError(f"{named}: {reason.lower()}; choose another") from error


def _open_journal(config: ServeConfig) -> Journal | None:
    """Open the server's journal, if it is to have one.

    Raises:
        ConfigError: the file is not for this server.
    """
    from ..runtime.serving.journal import Journal

    if config.serve.journal is None:
        return None
    model = config.model
    outputs = [config.seed, model.weights, model.tokenizer, to_mapping(config)["model"]["architecture"]]
    fingerprint = hashlib.sha256(msgspec.json.encode(outputs)).hexdigest()
    return Journal(Path(config.serve.journal), model.name, fingerprint)


def _say(text: str) -> None:
    print(f"gapless: {text}", file=sys.stderr, flush=True)


async def _serve(config: ServeConfig, prepared: Prepared, listener: socket.socket, run_dir: Path) -> int:
    import uvicorn

    from ..runtime.pipeline.protocol import PipelineError
    from .server.app import make_app
    from .server.connections import protocol_of
    from .server.engine_client import EngineClient
    from .server.fleet import Engine, Fleet
    from .server.journaling import Journaling
    from .server.live import Live
    from .server.metrics import Metrics as ServerMetrics
    from .server.recorder import Recorder
    from .server.service import Service

    began = time.monotonic()
    plan, intake = prepared.plan, prepared.intake
    name = config.serve.model_name or config.model.name
    metrics = ServerMetrics(name, plan.num_blocks)

    def say_since_start(text: str) -> None:
        _say(f"{time.monotonic() - began:5.1f} s  {text}")

    journal = _open_journal(config)
    numbers = itertools.count(journal.next_number if journal is not None else 0)
    client: Engine
    if config.serve.replicas == 1:
        client = EngineClient(config, intake.tokenizer, metrics, say_since_start, numbers=numbers)
    else:
        client = Fleet(config, intake.tokenizer, metrics, say_since_start, num_blocks=plan.num_blocks, numbers=numbers)
    layers, policy = config.parallel.layers, config.scheduler.name
    live = [Live(name, client, number, layers=layers, policy=policy) for number in range(len(client.replicas))]
    recorders = [Recorder(each, run_dir, plain(to_mapping(config)), versions()) for each in client.replicas]
    host, port = listener.getsockname()[:2]
    journaling = None if journal is None else Journaling(journal, _say)
    service = Service(
        config.serve, prepared.keys, name, plan.max_model_len, intake, prepared.template, client, metrics, live,
        recorders, ip_address(host).is_loopback, journaling,
    )  # fmt: skip
    if journal is not None and journaling is not None:
        await _take_up(service, journaling, journal)
    app = make_app(service)
    settings = uvicorn.Config(
        app, http=protocol_of(config.serve), ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(settings)
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # ours drain first
    ended = _Signals(asyncio.get_running_loop())
    serving = asyncio.create_task(server.serve([listener]))
    watching = [asyncio.create_task(each) for each in (_watch_stalls(metrics), *(one.run() for one in live))]
    shown = f"[{host}]" if ":" in host else host
    _say(f"listens at http://{shown}:{port}; the live page is at /, health at /health")
    try:
        await client.start()
        await asyncio.to_thread(prepared.intake.prepare_structured_outputs)
        await _until_ready(client, ended)
        if client.state in ("ready", "recovering"):
            metrics.longest_stall = metrics.longest_own_stall = 0.0
            say_since_start(f"{name} takes requests at http://{shown}:{port}/v1")
            failed = asyncio.create_task(_until_failed(client))
            stop = asyncio.create_task(ended.first.wait())
            await asyncio.wait({failed, stop}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            stop.cancel()
        if ended.first.is_set() and client.state != "failed":
            await _drain(client, config.serve.drain_s)
    finally:
        for task in watching:
            task.cancel()
        if journaling is not None:
            journaling.close()
        server.should_exit = True
        await client.close()
        await serving
    if client.error is not None:
        raise (ConfigError if client.error.is_config else PipelineError)(client.error.error)
    if client.state == "failed":
        raise PipelineError(client.reason)
    return 0


async def _take_up(service: Service, journaling: Journaling, journal: Journal) -> None:
    """Have the engine go on with what the server before has left, and write what this one does."""
    from ..runtime.serving.journal import KEY
    from .server.resume import resume

    named = f"{KEY}={service.config.journal}"
    if journal.cut_bytes:
        _say(f"{named}: the last {journal.cut_bytes} bytes were not written whole, and are dropped")
    unfinished = await resume(service, journaling, journal.saved)
    if journal.saved:
        _say(f"{named}: requests taken up again: {len(journal.saved)}; their unfinished outputs: {len(unfinished)}")

    def submit() -> None:
        while unfinished:
            unfinished.pop(0)()

    for replica in service.client.replicas:
        replica.on_ready, replica.on_tokens = submit, journaling.take_tokens


class _Signals:
    """The first SIGTERM, SIGINT or SIGHUP sets `first`. A second one ends the process at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self._at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        if not self.first.is_set():
            self.first.set()
            self._at = time.monotonic()
        elif time.monotonic() - self._at > _SECOND_SIGNAL_S:
            _say("ends at once")
            os._exit(128 + number)


async def _watch_stalls(metrics: Metrics) -> None:
    """Note by how much the event loop wakes this task too late, and for how much of that it was computing itself."""
    while True:
        due, computed = time.monotonic() + _STALL_INTERVAL_S, time.thread_time()
        await asyncio.sleep(_STALL_INTERVAL_S)
        late = time.monotonic() - due
        metrics.longest_stall = max(metrics.longest_stall, late)
        metrics.longest_own_stall = max(metrics.longest_own_stall, min(late, time.thread_time() - computed))


async def _until_ready(client: Any, ended: _Signals) -> None:
    stop = asyncio.create_task(ended.first.wait())
    while client.state == "starting" and not stop.done():
        client.changed.clear()
        changed = asyncio.create_task(client.changed.wait())
        await asyncio.wait({changed, stop}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
    stop.cancel()


async def _until_failed(client: Any) -> None:
    while client.state in ("ready", "recovering"):
        client.changed.clear()
        await client.changed.wait()


async def _drain(client: Any, seconds: float) -> None:
    """Finish what runs, within `seconds`."""
    client.drain()
    deadline = time.monotonic() + seconds
    if client.num_unfinished:
        _say(f"shuts down: {client.num_unfinished} requests get up to {seconds:g} s to finish")
    while client.num_unfinished and client.state == "draining" and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if client.num_unfinished:
        _say(f"ends {client.num_unfinished} requests that are unfinished after serve.drain_s={seconds:g}")
