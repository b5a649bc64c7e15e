"""One run of llama.cpp for `benchmarks/peer.py`, with batched calls, under a Python that has `llama-cpp-python`.

The argument is a job in JSON. Prompts are computed first, `chunk` tokens at a time, then all decodes together. Only the
last token of a prompt gets logits; numpy selects greedy tokens. llama.cpp's threads spin, so nothing else may run.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np

Entry = tuple[int, int, int, bool]  # token id, position, sequence, whether its logits are wanted
_SILENT = llama.llama_log_callback(lambda *_: None)


class Sequences:
    """Requests batched in one llama.cpp context."""

    def __init__(self, path: str, *, most: int, length: int, chunk: int, threads: int) -> None:
        llama.llama_log_set(_SILENT, ctypes.c_void_p())
        llama.llama_backend_init()
        model_keys = llama.llama_model_default_params()
        model_keys.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(path.encode(), model_keys)
        keys = llama.llama_context_default_params()
        keys.n_seq_max, keys.n_ctx = most, most * -(-length // 256) * 256
        keys.n_batch = keys.n_ubatch = self._chunk = chunk
        keys.n_threads = keys.n_threads_batch = threads
        keys.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama.llama_init_from_model(model, keys)
        self._batch = llama.llama_batch_init(chunk, 0, 1)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        """Return `output` greedy tokens for each request."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        tokens: list[list[int]] = [[] for _ in prompts]
        pending = [
            (token, at, number, at == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        for begin in range(0, len(pending), self._chunk):
            self._compute(pending[begin : begin + self._chunk], tokens)
        for step in range(output - 1):
            self._compute(((own[-1], len(prompts[i]) + step, i, True) for i, own in enumerate(tokens)), tokens)
        return tokens

    def _compute(self, entries: Iterable[Entry], tokens: list[list[int]]) -> None:
        batch, wanted = self._batch, []
        for row, (token, at, number, has_logits) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, at
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, number, has_logits
            batch.n_tokens = row + 1
            if has_logits:
                wanted.append((row, number))
        if code := llama.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode gave {code}")
        for row, number in wanted:
            logits = llama.llama_get_logits_ith(self._context, row)
            found = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))
            tokens[number].append(int(found.argmax()))


def main() -> None:
    job = json.loads(sys.argv[1])
    rounds = [each["requests"] for each in json.loads(Path(job["rounds"]).read_text())]
    length = max(len(request["prompt"]) + request["output"] for requests in rounds for request in requests)
    most, threads = max(map(len, rounds)), job["threads"]
    engine = Sequences(job["model"], most=most, length=length, chunk=job["chunk"], threads=threads)
    engine.generate([rounds[0][0]["prompt"]], 1)
    print("first", flush=True)
    engine.generate([request["prompt"] for request in rounds[0][:4]], 4)
    seconds, outputs = [], []
    for requests in rounds:
        begin = time.perf_counter()
        outputs += engine.generate([request["prompt"] for request in requests], requests[0]["output"])
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
