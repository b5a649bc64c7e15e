"""One run of vLLM's CPU build for `benchmarks/peer.py` and `vllm_trace.py`, under vLLM's Python.

The argument is a job in JSON. `rounds` is a file with rounds of requests, which run one after another.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    job = json.loads(sys.argv[1])
    rounds = json.loads(Path(job["rounds"]).read_text())
    first = rounds[0]["requests"]
    keys = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "dtype": job.get("dtype", "float32")}
    llm = LLM(job["model"], **keys, **job["keys"])

    def generate(requests: list[dict[str, Any]], most: int = 1 << 30) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        fixed = {"ignore_eos": True, "temperature": 0.0, "detokenize": False}
        sampling = [SamplingParams(max_tokens=min(most, request["output"]), **fixed) for request in requests]
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False)]

    generate(first[:1], 1)
    print("first", flush=True)
    generate(first[:4], 4)
    is_traced = "profiler_config" in job["keys"]
    if is_traced:
        llm.start_profile()
    seconds, outputs = [], []
    for each in rounds:
        time.sleep(each["pause"])
        begin = time.perf_counter()
        outputs += generate(each["requests"])
        seconds.append(time.perf_counter() - begin)
    if is_traced:
        llm.stop_profile()
    print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
