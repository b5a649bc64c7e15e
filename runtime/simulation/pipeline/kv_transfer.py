"""The links that carry KV caches from the prefill pool to the decode pool, and the transfers waiting for them."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ....models.memory import BYTES, kv_bytes_per_token
from ...core.request import Request
from ..cost.link import Link
from .setting import Setting


class KvTransfer:
    """The transfer of a request's prompt KV.

    `source` and `target` are indices of replicas in their pools. Times are seconds on the clock of the fleet; `begin`
    and `end` are infinite while it waits for its links.
    """

    def __init__(self, request: Request, source: int, target: int) -> None:
        self.request = request
        self.source = source
        self.target = target
        self.begin = math.inf
        self.end = math.inf


class KvLinks:
    """The links between two pools.

    Each port of a prefill or decode replica carries one transfer at a time. A waiting transfer starts as soon as both
    of its ports are free; earlier transfers take precedence.

    Args:
        ways: the links that a transfer crosses, each with the number of parallel messages over which its bytes are
            split evenly; the slowest link counts.
        bytes_per_token: KV bytes per token, by the layers' attention window; None: full attention.
        sources, targets: port of each prefill and of each decode replica. Replicas of one node may share a port.
    """

    def __init__(
        self,
        ways: Sequence[tuple[Link, float]],
        bytes_per_token: Mapping[int | None, int],
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        self._ways = list(ways)
        self._bytes_per_token = dict(bytes_per_token)
        self._sources = list(sources)
        self._targets = list(targets)
        self._waiting: list[KvTransfer] = []
        self._under_way: list[KvTransfer] = []

    @property
    def next_event(self) -> float:
        """When the next transfer ends; infinity if none is in progress."""
        return min([transfer.end for transfer in self._under_way], default=math.inf)

    def add(self, transfer: KvTransfer) -> None:
        """Queue a transfer for its two ports."""
        self._waiting.append(transfer)

    def begin(self, now: float) -> None:
        """Start the transfers whose ports are free."""
        if not self._waiting:
            return
        sending = {self._sources[transfer.source] for transfer in self._under_way}
        receiving = {self._targets[transfer.target] for transfer in self._under_way}
        waiting: list[KvTransfer] = []
        for transfer in self._waiting:
            source, target = self._sources[transfer.source], self._targets[transfer.target]
            if source in sending or target in receiving:
                waiting.append(transfer)
                continue
            transfer.begin = now
            tokens = transfer.request.prompt_len
            parts = [min(tokens, window or tokens) * each for window, each in self._bytes_per_token.items()]
            transfer.end = now + max([link.seconds(sum(parts) / flows) for link, flows in self._ways])
            self._under_way.append(transfer)
            sending.add(source)
            receiving.add(target)
        self._waiting = waiting

    def end(self, now: float) -> list[KvTransfer]:
        """Return and remove the transfers that have ended by `now`."""
        ended = [transfer for transfer in self._under_way if transfer.end <= now]
        if ended:
            self._under_way = [transfer for transfer in self._under_way if transfer.end > now]
        return ended


def make_links(prefill: Setting, decode: Setting) -> KvLinks:
    """Make the links between two pools of replicas; each pool fills its own nodes in order.

    Over the network, each replica has one flow per rank, at most `cluster.network_adapters` per node, and a transfer
    uses the smaller of the two replicas' numbers. Replicas that share a node's adapters share a port. If the pools span
    racks, transfers also cross the links between racks. Within a node, a transfer has one flow per rank of the smaller
    replica.
    """
    cluster = decode.config.cluster
    over_network = decode.config.simulation.disaggregation.link == "network"
    per_node, adapters = cluster.devices_per_node, cluster.network_adapters if over_network else None
    nodes = 0
    flows: list[int] = []
    links: list[Link] = []
    ports: list[list[int]] = []
    for setting in (prefill, decode):
        costs, ranks = setting.config.hardware.costs, setting.config.parallel.world_size
        assert costs is not None, "`make_setting` checks it"
        own = (cluster.network or costs.network) if over_network else (cluster.node or costs.node)
        links.append(Link(own))
        number = setting.config.simulation.replicas
        on_a_node = max(1, per_node // ranks)  # replicas
        nodes += -(-number // on_a_node) * -(-ranks // per_node)
        if adapters is None:
            flows.append(ranks)
            ports.append(list(range(number)))
        else:
            flows.append(-(-ranks // per_node) * min(ranks, per_node, adapters))
            ports.append([replica // on_a_node for replica in range(number)])
    most = min(flows)
    ways: list[tuple[Link, float]] = [(link, most) for link in links]
    if over_network and cluster.nodes_per_rack is not None and nodes > cluster.nodes_per_rack:
        spine = Link(cluster.spine) if cluster.spine is not None else links[0]
        ways.append((spine, min(float(most), cluster.uplinks)))
    arch, element = decode.plan.arch, BYTES[decode.plan.dtype]
    layers = Counter(arch.kind(i).window for i in range(arch.num_layers))
    dtype = decode.config.cache.dtype
    sizes = {window: kv_bytes_per_token(arch, count, 1, element, dtype) for window, count in layers.items()}
    return KvLinks(ways, sizes, ports[0], ports[1])
