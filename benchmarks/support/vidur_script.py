"""Simulates with Vidur or predicts times of micro-batches; `benchmarks.vidur` runs it with Vidur's interpreter.

    PYTHON -I benchmarks/support/vidur_script.py TASK.json RESULT.json

Imports nothing of gapless and does not modify Vidur (microsoft/vidur, MIT): it configures Vidur's classes, with plots
and traces off. The measurements are in Vidur's download cache.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vidur import config as c
from vidur.entities import Batch
from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
from vidur.simulator import Simulator
from vidur.types import ReplicaId
from vidur.utils.random import set_seeds

OPERATORS = {  # our names, and the attributes of Vidur's execution time that they sum, in milliseconds of a layer
    "preproj": ("attention_layer_pre_proj_execution_time",),
    "postproj": ("attention_layer_post_proj_execution_time",),
    "ffn_ln1": ("mlp_layer_up_proj_execution_time",),
    "ffn_ln2": ("mlp_layer_down_proj_execution_time",),
    "attn": ("attention_prefill_execution_time", "attention_decode_execution_time"),
    "others": (
        "attention_rope_execution_time",
        "mlp_layer_act_execution_time",
        "attn_norm_time",
        "mlp_norm_time",
        "add_time",
    ),
    "all_reduce": ("tensor_parallel_communication_time", "tensor_parallel_communication_time"),
}


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    set_seeds(task["seed"])
    result = operators(task) if "micro_batches" in task else simulate(task)
    Path(result_file).write_text(json.dumps(result))


def simulate(task: dict[str, Any]) -> dict[str, Any]:
    """Simulate; returns `seconds` of CPU and, for each request, arrival, first token and end in simulated seconds.

    The CPU time includes writing metrics, if any, but not the setup, which trains or loads the predictors.
    """
    simulator = Simulator(configuration(task))
    requests = [event._request for _, event in simulator._event_queue]
    ready = time.process_time()
    simulator.run()
    end = time.process_time()
    return {
        "seconds": end - ready,
        "requests": [(r.arrived_at, r.prefill_completed_at, r.completed_at) for r in requests],
    }


def operators(task: dict[str, Any]) -> dict[str, Any]:
    """Predict the milliseconds of each operator of one layer for each micro-batch."""
    cluster = configuration(task).cluster_config
    predictor_config = task_predictor(task)
    predictor = ExecutionTimePredictorRegistry.get(
        predictor_config.get_type(),
        predictor_config=predictor_config,
        replica_config=cluster.replica_config,
        cache_config=cluster.cache_config,
    )
    times = []
    for requests in task["micro_batches"]:
        tokens, context = map(list, zip(*requests, strict=True))
        took = predictor.get_execution_time(Batch(ReplicaId(1), [None] * len(tokens), tokens, context), 0)
        layer = {name: sum(getattr(took, part) for part in parts) for name, parts in OPERATORS.items()}
        times.append(layer)
    return {"times": times}


def configuration(task: dict[str, Any]) -> Any:
    replica = c.ReplicaConfig(
        model_name=task["model"],
        num_pipeline_stages=task["pp"],
        tensor_parallel_size=task["tp"],
        enable_sequence_pipeline_parallel=task["follow"],
        device="a100",
        network_device="a100_dgx",
    )
    cache = c.CacheConfig(block_size=task["block_size"], num_blocks=task["num_blocks"])
    factors = dict.fromkeys(("prefill_scale_factor", "decode_scale_factor", "time_scale_factor"), 1.0)
    no_pictures = dict.fromkeys(("write_json_trace", "enable_chrome_trace", "store_plots"), False)
    return c.SimulationConfig(
        seed=task["seed"],
        log_level="error",
        cluster_config=c.ClusterConfig(
            num_replicas=1, replica_config=replica, cache_config=cache, replica_scheduler_config=policy(task)
        ),
        request_generator_config=c.TraceRequestGeneratorConfig(
            trace_file=task["trace"], date=task["date"], max_tokens=task["context"], **factors
        ),
        execution_time_predictor_config=task_predictor(task),
        metrics_config=c.MetricsConfig(write_metrics=task["metrics"], output_dir=task["output"], **no_pictures),
    )


def policy(task: dict[str, Any]) -> Any:
    name, most = task["policy"], task["batch_size_cap"]
    if name == "sarathi":
        return c.SarathiSchedulerConfig(batch_size_cap=most, chunk_size=task["tokens"])
    if name == "vllm":
        return c.VllmSchedulerConfig(batch_size_cap=most, max_tokens_in_batch=task["tokens"])
    assert name == "orca", name
    return c.OrcaSchedulerConfig(batch_size_cap=most)


def task_predictor(task: dict[str, Any]) -> Any:
    """Configure random forests, Vidur's default, with one size instead of a search over 27, and one thread."""
    return c.RandomForrestExecutionTimePredictorConfig(
        model_profiling_dataset=task["compute"],
        network_profiling_dataset=task["network"],
        prediction_max_tokens_per_request=task["most_tokens"],
        num_estimators=[250],
        max_depth=[32],
        min_samples_split=[2],
        num_training_job_threads=1,
        cache_dir=task["cache"],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
