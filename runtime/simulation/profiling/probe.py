"""Times each operator of a stage through hooks, without changing its layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ....models.attention.backend import AttentionBackend
from ....models.batch import RaggedBatch
from ....models.decoder import Attention, DecoderLayer, FeedForward
from ....models.stage import Stage

LAYER_OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2")
_OF_A_LAYER = (*LAYER_OPERATORS, "others")


class Probe:
    """Marks, through hooks on a stage's modules, when each operator starts and ends. Operators run as in a real run.

    On a CPU a mark is a clock reading, on CUDA an event. If the host lags behind the device, the gap counts towards the
    operator that waits for its launch. Marks cost host time too, so on CUDA the micro-batch runs once more without
    them, and the operators' times are scaled to that total. If decodes go through all layers in one call, they run
    layer by layer first, and their operators are scaled to the time of that call.
    """

    def __init__(self, stage: Stage) -> None:
        self._is_cuda = stage.device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._is_marking = True
        self._num_layers = len(stage.decoder)
        self._stage, self._decodes = stage, stage.decodes
        if self._decodes is not None:
            self._decodes.compute = self._marked("layer", self._decodes.compute)  # type: ignore[method-assign]
        if stage.embedding is not None:
            self._add_hooks("embedding", stage.embedding)
        for layer in stage.decoder:
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.attention, Attention), "the plan of a profile refuses others"
            assert isinstance(layer.ffn, FeedForward)
            self._add_hooks("layer", layer)
            self._add_hooks("preproj", layer.attention.qkv)
            layer.attention.backend = _MarkedBackend(layer.attention.backend, self._mark_operator)
            self._add_hooks("postproj", layer.attention.out)
            self._add_hooks("ffn_ln1", layer.ffn.fc1)
            self._add_hooks("ffn_ln2", layer.ffn.fc2)

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        def mark(*_: object) -> None:
            self._mark_operator(name)

        module.register_forward_pre_hook(mark)
        module.register_forward_hook(mark)

    def _marked(self, name: str, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def marked(*inputs: Any) -> torch.Tensor:
            self._mark_operator(name)
            out = compute(*inputs)
            self._mark_operator(name)
            return out

        return marked

    def _mark_operator(self, name: str) -> None:
        if self._is_marking:
            self._mark(name)

    def _mark(self, name: str) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def measure(self, compute: Callable[[], object], *, decodes_only: bool = False) -> dict[str, float]:
        """Run `compute` for one micro-batch, and return its seconds by part.

        A layer's operators and `others` are averages over the layers. `embedding` is the stage's embedding, `step` all
        else before the first layer, `head` all after the last layer, and `total` the whole micro-batch.
        """
        self._stage.decodes = None
        parts = self._measure_marked(compute)
        if self._decodes is not None and decodes_only:
            self._stage.decodes = self._decodes
            whole = self._measure_marked(compute)
            scale = sum(map(whole.__getitem__, _OF_A_LAYER)) / sum(map(parts.__getitem__, _OF_A_LAYER))
            return whole | {name: scale * parts[name] for name in _OF_A_LAYER}
        if not self._is_cuda:
            return parts
        self._is_marking = False
        self._run(compute)
        self._is_marking = True
        scale = self._since_begin(self._marks[-1][1]) / parts["total"]
        return {name: seconds * scale for name, seconds in parts.items()}

    def _run(self, compute: Callable[[], object]) -> None:
        self._marks.clear()
        self._mark("begin")
        compute()
        self._mark("end")
        if self._is_cuda:
            torch.cuda.synchronize()

    def _measure_marked(self, compute: Callable[[], object]) -> dict[str, float]:
        """Run `compute` with marks, and sum the time between the two marks of each operator."""
        self._run(compute)
        began: dict[str, float] = {}
        spent: dict[str, float] = {}
        layers_begin = layers_end = 0.0
        for name, mark in self._marks:
            seconds = self._since_begin(mark)
            if name not in began:
                began[name] = seconds
                if name == "layer" and "layer" not in spent:
                    layers_begin = seconds
            else:
                spent[name] = spent.get(name, 0.0) + seconds - began.pop(name)
                layers_end = seconds if name == "layer" else layers_end
        end = began["end"]
        each = {name: spent.get(name, 0.0) / self._num_layers for name in LAYER_OPERATORS}
        embedding = spent.get("embedding", 0.0)
        others = (layers_end - layers_begin) / self._num_layers - sum(each.values())
        return each | {
            "others": others,
            "embedding": embedding,
            "step": layers_begin - embedding,
            "head": end - layers_end,
            "total": end,
        }

    def _since_begin(self, mark: Any) -> float:
        """Return the seconds from the first mark to `mark`."""
        begin = self._marks[0][1]
        seconds: float = begin.elapsed_time(mark) / 1e3 if self._is_cuda else mark - begin
        return seconds


class _MarkedBackend(AttentionBackend):
    """An attention backend that marks the start and the end of each layer's attention."""

    def __init__(self, backend: AttentionBackend, mark: Callable[[str], None]) -> None:
        self.about = backend.about
        self._backend = backend
        self._mark = mark

    def plan(self, batch: RaggedBatch) -> Any:
        return self._backend.plan(batch)

    def attend(self, q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: Any) -> torch.Tensor:
        self._mark("attn")
        out = self._backend.attend(q_TKGD, keys_SKD, values_SKD, plan)
        self._mark("attn")
        return out
