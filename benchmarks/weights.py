"""Measures where a rank that was started again gets its weights the soonest: `python -m benchmarks.weights`.

Matrices of a shard (4096 x 4096, as many as make up --gib) are read from a safetensors file, as a rank reads its own
from its node's page cache, and are received from a peer that holds them: another process of this machine, over gloo and
loopback, as from a replica's rank of the same stage. A network between two nodes is not faster than its loopback. A
tensor-parallel peer holds another shard, and cannot help. Both fill the same tensors, by turns. `disk`: the file is not
in the page cache any more (`posix_fadvise`), as on a node that has never read it.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from gapless.models.checkpoint import SafetensorsFolder
from gapless.models.weights import Piece

from .support.harness import Benchmark, by_turns, scratch, spread

SIDE = 4096


def main() -> int:
    bench = Benchmark(__doc__, gib=2.0, rounds=5)
    rounds, count = bench.given.rounds, max(1, round(bench.given.gib * 2**30 / (2 * SIDE * SIDE)))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = get_context("spawn").Process(target=_send, args=(store.port, count, rounds), daemon=True)
    with scratch() as folder:
        weights = {f"layer.{i}": torch.randn(SIDE, SIDE).bfloat16() for i in range(count)}
        save_file(weights, folder / "model.safetensors")
        os.sync()  # only what is written can leave the page cache
        targets = [torch.empty(1, SIDE, SIDE, dtype=torch.bfloat16) for _ in range(count)]
        peer.start()
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)

        def seconds(kind: str) -> float:
            if kind == "disk":
                _evict(folder / "model.safetensors")
            begun = time.monotonic()
            if kind == "peer":
                dist.barrier()
                for target in targets:
                    dist.recv(target, 1)
            else:
                source = SafetensorsFolder(folder)
                for i, target in enumerate(targets):
                    Piece(f"layer.{i}", target).load(source)
                source.close()
            taken = time.monotonic() - begun
            assert torch.equal(targets[-1][0], weights[f"layer.{count - 1}"]) or kind == "peer"
            return taken

        found = by_turns(rounds, {kind: partial(seconds, kind) for kind in ("page cache", "peer", "disk")})
    peer.join()
    gib = count * 2 * SIDE * SIDE / 2**30
    for kind, times in found.items():
        taken = spread(times)
        over = taken["median_s"] / spread(found["page cache"])["median_s"]
        bench.row(
            "weights", **{"from": kind}, gib=gib, **taken, gib_per_s=gib / taken["median_s"], times_page_cache=over
        )
    return bench.end()


def _send(port: int, count: int, rounds: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    weights = [torch.randn(1, SIDE, SIDE).bfloat16() for _ in range(count)]
    for _ in range(rounds):
        dist.barrier()
        for weight in weights:
            dist.send(weight, 0)


def _evict(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
