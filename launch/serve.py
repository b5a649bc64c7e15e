"""`gapless serve`: an OpenAI-compatible server over one or several pipelines, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..conf.build import to_mapping
from ..conf.errors import ConfigError, reason
from ..conf.schema import ServeConfig
from ..conf.serving import ServingConfig
from ..models.gguf.smollm2 import INSTALL, is_installed
from ..runtime.core.numbers import counted
from .installed import has_analysis
from .open_files import allow_files
from .oversubscription import threads
from .progress import versions
from .prompts import StandardInput
from .results import plain
from .stderr_log import as_configured

if TYPE_CHECKING:
    import uvicorn

    from ..runtime.engine.intake import Intake
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.serving.journal import Journal
    from .server.engine_client import State
    from .server.exchange import Exchange
    from .server.keys import Keys
    from .server.monitor.monitor import Monitor
    from .server.prometheus import Metrics
    from .server.replica_set import Engine
    from .server.service import Service
    from .server.tracing import Traces

_log = logging.getLogger(__name__)
_SECOND_SIGNAL_S = 1.0  # after the first; torchrun forwards the Ctrl-C that its ranks have already received
_BACKLOG = 2048
_NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_STALL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class PreparedServer:
    """A validated server."""

    plan: Plan
    intake: Intake
    keys: Keys


def prepare(config: ServeConfig, stdin: StandardInput) -> PreparedServer:
    """Validate a server before anything starts.

    Raises:
        ConfigError: the checkpoint or its chat template is invalid, the model does not fit, or the port is in use.
    """
    from ..runtime.engine.intake import Intake
    from ..runtime.engine.plan import make_plan
    from ..runtime.pipeline.launcher import check_launcher
    from .server.keys import Keys
    from .server.replica_share import check_replicas

    check_replicas(config)
    check_launcher(config.parallel, config.hardware)
    allow_files(config.serve.max_connections)
    keys = Keys(config.serve.api_keys)
    plan = make_plan(config)
    for listener in _bind(config):
        listener.close()
    _check_tls(config.serve)
    if (traces := _make_traces(config)) is not None:
        traces.close()
    if (journal := _open_journal(config)) is not None:
        journal.close()
    intake = Intake(plan, config.serve.chat_template)
    _ = intake.chat_template  # an invalid template fails here
    return PreparedServer(plan, intake, keys)


def run(config: ServeConfig, prepared: PreparedServer, run_dir: Path, launcher: Launcher | None = None) -> int:
    """Serve until a signal. Return exit code 0 after a drain.

    Raises:
        ConfigError: a user error found while the engine started.
        PipelineError: the engine failed.
    """
    with as_configured(config.serve.log_level, config.serve.log_format):
        return asyncio.run(_serve(config, prepared, _bind(config), run_dir))


def _bind(config: ServeConfig) -> list[socket.socket]:
    """Open the server's port at each address of the host name; localhost has an IPv4 and an IPv6 address.

    Raises:
        ConfigError: the port is in use, or the address is not local.
    """
    host, port = config.serve.host.strip("[]'"), config.serve.port  # brackets as in URLs; a shell may keep the quotes
    bound: list[socket.socket] = []
    try:
        found = {(family, address[0]): address for family, _, _, _, address in _addresses(host, port)}
        for (family, name), address in found.items():
            has_both = name == "::" and socket.has_dualstack_ipv6()
            own = (name, port or (bound[0].getsockname()[1] if bound else 0), *address[2:])
            try:
                bound.append(socket.create_server(own, family=family, backlog=_BACKLOG, dualstack_ipv6=has_both))
                # Inherited by connections. Nagle's algorithm would delay a token until the last one is acknowledged.
                bound[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                if error.errno not in _NO_ADDRESS or len(found) == 1:  # such as ::1 without IPv6
                    raise
        if not bound:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return bound
    except OSError as error:
        for each in bound:
            each.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        named = f"serve.port={port}" if error.errno == errno.EADDRINUSE else f"serve.host={host}"
        raise ConfigError(f"{named}: {reason.lower()}; choose another") from error


def _addresses(host: str, port: int) -> list[Any]:
    """Return the `getaddrinfo` results of a host. `localhost` is both loopback addresses (RFC 6761, 6.3)."""
    names = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    return [found for name in names for found in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]


def _check_tls(serving: ServingConfig) -> None:
    """Check the files of `serve.ssl_*`.

    Raises:
        ConfigError: a file is unreadable, or the key does not match the certificate.
    """
    if serving.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(serving.ssl_certfile, serving.ssl_keyfile, lambda: "")  # no password prompt
    except OSError as error:  # ssl.SSLError is one
        key, hint = serving.ssl_keyfile, "" if serving.ssl_keyfile else "; set serve.ssl_keyfile"
        files = f"serve.ssl_certfile={serving.ssl_certfile}" + (f" serve.ssl_keyfile={key}" if key else "")
        why = f"not a certificate with its private key{hint}" if isinstance(error, ssl.SSLError) else reason(error)
        raise ConfigError(f"{files}: {why}") from error
    try:
        context.load_verify_locations(serving.ssl_ca_certs or serving.ssl_certfile)
    except OSError as error:
        raise ConfigError(f"serve.ssl_ca_certs={serving.ssl_ca_certs}: no certificates in the file") from error


def _open_journal(config: ServeConfig) -> Journal | None:
    """Open the server's journal, if configured.

    Raises:
        ConfigError: the file belongs to another server.
    """
    from ..runtime.serving.journal import Journal

    if config.serve.journal is None:
        return None
    model = config.model
    outputs = [config.seed, model.weights, model.tokenizer, to_mapping(config)["model"]["architecture"]]
    fingerprint = hashlib.sha256(msgspec.json.encode(outputs)).hexdigest()
    return Journal(Path(config.serve.journal), model.name, fingerprint)


async def _serve(config: ServeConfig, prepared: PreparedServer, listeners: list[socket.socket], run_dir: Path) -> int:
    from ..runtime.pipeline.protocol import PipelineError
    from .server.access import Access
    from .server.engine_client import TAKES_REQUESTS

    log = partial(_log_since, time.monotonic())
    host, port = listeners[0].getsockname()[:2]
    is_local = all(ip_address(each.getsockname()[0]).is_loopback for each in listeners)
    journal = _open_journal(config)
    service = _make_service(config, prepared, journal, run_dir, log, is_local=is_local)
    _log_start(config, prepared.plan, service, run_dir)
    if journal is not None:
        await _take_up(service, journal)
    client, metrics = service.client, service.metrics
    access = Access(service.keys, metrics, service.limits, _make_traces(config))
    server = _make_http_server(service, access.note)
    ended = _Signals(asyncio.get_running_loop())
    serving = asyncio.create_task(server.serve(listeners))
    monitored = () if service.monitor is None else service.monitor.live
    watching = [asyncio.create_task(each) for each in (_watch_stalls(metrics), *(one.run() for one in monitored))]
    scheme = "http" if config.serve.ssl_certfile is None else "https"
    address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    _log.info("listens at %s; live page at /, health at /health", address)
    try:
        await client.start()
        with suppress(ConfigError):  # no suitable tokenizer; requests that need it get an error
            await asyncio.to_thread(service.compiler.start)
        await _while_in(("starting",), client, ended)
        if client.state in TAKES_REQUESTS:
            metrics.longest_stall = metrics.longest_own_stall = 0.0
            log(logging.INFO, f"{service.model} takes requests at {address}/v1")
            await _while_in(TAKES_REQUESTS, client, ended)
        if ended.first.is_set() and client.state != "failed":
            await _drain(client, config.serve.drain_s)
    finally:
        for task in watching:
            task.cancel()
        if service.journaling is not None:
            service.journaling.close()
        server.should_exit = True
        await client.close()
        service.compiler.close()
        await serving
        access.close()
    if client.error is not None:
        raise (ConfigError if client.error.is_config else PipelineError)(client.error.error)
    if client.state == "failed":
        raise PipelineError(client.reason)
    return 0


def _log_start(config: ServeConfig, plan: Plan, service: Service, run_dir: Path) -> None:
    """Log the configuration, and warn if the server is open to other machines."""
    model, policy = config.model, config.scheduler.name
    named = service.model if service.model == model.name else f"{service.model} ({model.name})"
    tokens = plan.kv_tokens * config.serve.replicas
    _log.info(
        "version %s: model %s, policy %s, pp=%d x tp=%d, KV cache of %d tokens, %srun folder %s",
        *(versions()["gapless"], named, policy, config.parallel.pp, config.parallel.tp, tokens),
        *(f"{chosen}, " if (chosen := threads(config, config.serve.replicas)) else "", run_dir),
    )
    if service.intake.chat_template is None:
        how = "" if is_installed() else f" after {INSTALL} (93 MB)"
        text = "%s has no chat template and serves /v1/completions only; `gapless serve smollm2` can chat%s"
        _log.warning(text, named, how)
    if not service.is_local and not service.keys.are_set:
        text = "serve.host=%s: other machines can reach this server without authentication; set serve.api_keys"
        _log.warning(text, config.serve.host)


def _log_since(began: float, level: int, text: str) -> None:
    _log.log(level, "%5.1f s  %s", time.monotonic() - began, text)


def _make_service(
    config: ServeConfig,
    prepared: PreparedServer,
    journal: Journal | None,
    run_dir: Path,
    log: Callable[[int, str], None],
    *,
    is_local: bool,
) -> Service:
    """Make the parts of the server without starting the engine. `log` is called on changes of the engine's state."""
    from ..models.generation_config import sampling_defaults
    from .server.compiler import Compiler
    from .server.engine_client import EngineClient
    from .server.journaling import Journaling
    from .server.prometheus import Metrics as ServerMetrics
    from .server.rate_limit import RateLimits
    from .server.replica_set import ReplicaSet
    from .server.service import Service
    from .server.tools.dialect import Dialect

    plan, intake = prepared.plan, prepared.intake
    names = config.serve.model_names(config.model.name)
    name = names[0]
    metrics = ServerMetrics(name, plan.num_blocks)
    numbers = itertools.count(journal.next_number if journal is not None else 0)
    client: Engine
    if config.serve.replicas == 1:
        client = EngineClient(config, intake.tokenizer, metrics, log, numbers=numbers)
    else:
        client = ReplicaSet(config, intake.tokenizer, metrics, log, kv_tokens=plan.kv_tokens, numbers=numbers)
    template = intake.chat_template
    return Service(
        config=config.serve,
        keys=prepared.keys,
        model=name,
        aliases=names[1:],
        max_model_len=plan.max_model_len,
        intake=intake,
        compiler=Compiler((plan.tokenizer, plan.arch.vocab_size, tuple(plan.arch.eos_token_ids))),
        client=client,
        metrics=metrics,
        monitor=_make_monitor(config, name, client, metrics, run_dir, has_chat=template is not None),
        limits=RateLimits(config.serve.requests_per_minute, config.serve.tokens_per_minute),
        is_local=is_local,
        has_priorities=config.scheduler.order == "priority",
        journaling=None if journal is None else Journaling(journal),
        sampling=sampling_defaults(config.model),
        dialect=None if template is None else Dialect(template, intake.tokenizer, config.serve.tool_format),
    )


def _make_monitor(
    config: ServeConfig, name: str, client: Engine, metrics: Metrics, run_dir: Path, *, has_chat: bool
) -> Monitor | None:
    """Make the monitor of a server; None, with a log line, if `runtime/analysis` is not installed."""
    if not has_analysis():
        _log.info("no live page, recordings and idle times by cause: gapless.runtime.analysis is not installed")
        return None
    from .server.monitor.monitor import Monitor, idle_by_cause

    metrics.idle_by_cause = idle_by_cause
    return Monitor.of(name, client, run_dir, plain(to_mapping(config)), versions(), has_chat=has_chat)


def _make_traces(config: ServeConfig) -> Traces | None:
    """Make the trace exporter, if configured.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    from .server.tracing import Traces

    if config.serve.otlp_endpoint is None:
        return None
    return Traces(config.serve.otlp_endpoint, config.serve.model_names(config.model.name)[0])


def _make_http_server(service: Service, note: Callable[[Exchange], None]) -> uvicorn.Server:
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

    from .server.app import make_app
    from .server.connections import protocol_of
    from .server.every_answer import EveryAnswer

    serving = service.config
    settings = uvicorn.Config(
        EveryAnswer(make_app(service), serving.allowed_origins, note),
        http=protocol_of(serving, note),
        ssl_certfile=serving.ssl_certfile,
        ssl_keyfile=serving.ssl_keyfile,
        ssl_ca_certs=serving.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if serving.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        ws="none",
        lifespan="off",
        log_config=LOGGING_CONFIG if serving.log_format == "text" else None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=serving.keep_alive_s,  # type: ignore[arg-type]  # accepts floats
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(settings)
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]  # our handlers drain first
    return server


async def _take_up(service: Service, journal: Journal) -> None:
    """Resume the unfinished requests of the previous server, and journal the requests of this one."""
    from ..runtime.serving.journal import KEY
    from ..runtime.serving.messages import Started, Tokens
    from .server.engine_client import TAKES_REQUESTS
    from .server.resume import resume

    journaling = service.journaling
    assert journaling is not None

    named = f"{KEY}={service.config.journal}"
    if journal.cut_bytes:
        _log.info("%s: dropped %d bytes of an incomplete last entry", named, journal.cut_bytes)
    unfinished = await resume(service, journaling, journal.saved)
    if journal.saved:
        text = "%s: resumed requests: %d, with unfinished outputs: %d"
        _log.info(text, named, len(journal.saved), len(unfinished))

    def submit(message: Started, payload: bytes) -> None:
        while unfinished and service.client.state in TAKES_REQUESTS:
            unfinished.pop(0)()

    for replica in service.client.replicas:
        replica.listen(Started, submit)
        replica.listen(Tokens, journaling.take_tokens)


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
            _log.info("exiting immediately")
            os._exit(128 + number)


async def _watch_stalls(metrics: Metrics) -> None:
    """Record how late the event loop wakes this task, and how much of that was its own CPU time."""
    while True:
        due, computed = time.monotonic() + _STALL_INTERVAL_S, time.thread_time()
        await asyncio.sleep(_STALL_INTERVAL_S)
        late = time.monotonic() - due
        metrics.longest_stall = max(metrics.longest_stall, late)
        metrics.longest_own_stall = max(metrics.longest_own_stall, min(late, time.thread_time() - computed))


async def _while_in(states: Sequence[State], client: Engine, ended: _Signals) -> None:
    """Wait until the engine leaves `states`, or for a signal."""
    stop = asyncio.create_task(ended.first.wait())
    while client.state in states and not stop.done():
        client.changed.clear()
        changed = asyncio.create_task(client.changed.wait())
        await asyncio.wait({changed, stop}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
    stop.cancel()


async def _drain(client: Engine, seconds: float) -> None:
    """Finish running requests within `seconds`."""
    client.drain()
    deadline = time.monotonic() + seconds
    if client.num_unfinished:
        _log.info("shutting down; %s may take up to %g s to finish", counted(client.num_unfinished, "request"), seconds)
    while client.num_unfinished and client.state == "draining" and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if client.num_unfinished:
        _log.info("aborting %s unfinished after serve.drain_s=%g", counted(client.num_unfinished, "request"), seconds)
