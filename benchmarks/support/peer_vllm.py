"""One run of vLLM's CPU build for `benchmarks/peer.py`, under vLLM's Python. Its argument is the job, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    job = json.loads(sys.argv[1])
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(job["prompts"]).read_text())]
    several: dict[str, Any] = {"distributed_executor_backend": "mp"} if job["pp"] * job["tp"] > 1 else {}
    llm = LLM(
        job["model"], skip_tokenizer_init=True, dtype="float32", max_num_batched_tokens=job["chunk"],
        enable_prefix_caching=False, pipeline_parallel_size=job["pp"], tensor_parallel_size=job["tp"], **several,
    )  # fmt: skip

    def generate(requests: list[dict[str, Any]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        return [list(one.outputs[0].token_ids) for one in llm.generate(requests, sampling, use_tqdm=False)]

    generate(prompts[:1], 1)
    print("first", flush=True)
    generate(prompts[:4], 4)
    begin = time.perf_counter()
    outputs = generate(prompts, job["output"])
    print(json.dumps({"seconds": time.perf_counter() - begin, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
