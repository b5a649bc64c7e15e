"""The names of the files of a run folder."""

from __future__ import annotations

SUMMARY = "summary.json"
RECORD = "record.jsonl.gz"
SPANS = "spans.csv.gz"
REQUESTS = "requests.csv"
STAGE_TIMES = "stage_times.json"
TRACE = "trace.json.gz"
EXPLANATION = "explain.json"
REQUIRED = (SUMMARY, RECORD, SPANS)  # a folder that has them is a run folder

REPLICAS_KEY = "replicas"  # of a fleet's summary: how many run folders lie inside it
PREFILL_KEY = "prefill_replicas"  # the same: how many of them, the first ones, are a prefill pool


def replica_folder(number: int) -> str:
    """The name of a replica's run folder inside its fleet's."""
    return f"replica_{number}"
