"""Pages of the Python API: which classes and functions they show, in what order. Sphinx reads them from the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import gapless

ROOM = "gapless.runtime"
# Each page: its title, what it begins with, and under each heading what it shows.
PAGES: Mapping[str, tuple[str, str, Mapping[str, tuple[str, ...]]]] = {
    "api": (
        "Python API",
        "What `from gapless import ...` gives. [generate.md](../docs/generate.md#python) and "
        "[run_folder.md](../docs/run_folder.md#in-python) have examples.",
        {
            "Generate": (
                "gapless.LLM",
                "gapless.Conversation",
                "gapless.SamplingParams",
                "gapless.StructuredOutputs",
                "gapless.RequestOutput",
                "gapless.CompletionOutput",
            ),
            "Read runs": ("gapless.read_run", "gapless.Run", "gapless.Table"),
            "Errors": ("gapless.conf.errors.ConfigError",),
        },
    ),
    "plugins": (
        "Plug-ins",
        "What a policy, a launcher or a pipeline of your own extends or provides. [policies.md](../docs/policies.md) "
        "shows a whole policy.",
        {
            "Policies": (
                f"{ROOM}.scheduler.base.Scheduler",
                f"{ROOM}.scheduler.limits.Limits",
                "gapless.conf.policies.Depth",
                "gapless.conf.policies.SchedulerConfig",
                f"{ROOM}.scheduler.waiting.WaitingQueue",
            ),
            "What a policy gets": (
                f"{ROOM}.core.micro_batch.MicroBatch",
                f"{ROOM}.core.micro_batch.Chunk",
                f"{ROOM}.core.request.Request",
                f"{ROOM}.core.block_pool.BlockPool",
            ),
            "Launchers": (f"{ROOM}.pipeline.launcher.Launcher",),
            "Pipelines": (f"{ROOM}.pipeline.protocol.Pipeline", f"{ROOM}.pipeline.protocol.Clock"),
        },
    ),
    "data": (
        "Data of a run",
        "What `Run.record` and `Run.ledger` hold. [run_folder.md](../docs/run_folder.md) says in which files it lies.",
        {
            "The record": (
                f"{ROOM}.core.run_record.RunRecord",
                f"{ROOM}.core.run_record.MicroBatchRecord",
                f"{ROOM}.core.run_record.SegmentRecord",
                f"{ROOM}.core.run_record.DecodesRecord",
                f"{ROOM}.core.run_record.Wait",
                f"{ROOM}.core.run_record.FaultRecord",
                f"{ROOM}.core.messages.Span",
                f"{ROOM}.core.request_record.RequestRecord",
            ),
            "The ledger": (
                f"{ROOM}.analysis.ledger.ledger.Ledger",
                f"{ROOM}.analysis.ledger.causes.Cause",
                f"{ROOM}.analysis.ledger.idle.IdleColumns",
                f"{ROOM}.analysis.ledger.fleet.Fleet",
            ),
        },
    ),
}


def api_pages() -> dict[str, str]:
    """Return the pages, by path in the site."""
    missing = {f"gapless.{name}" for name in gapless.__all__} - {*names_shown(), "gapless.__version__"}
    assert not missing, f"the pages show all that the package exports: {missing}"
    return {f"reference/{name}.md": _page(*page) for name, page in PAGES.items()}


def names_shown() -> Iterator[str]:
    """Yield the dotted names of all that the pages show."""
    for _, _, parts in PAGES.values():
        for names in parts.values():
            yield from names


def _page(title: str, words: str, parts: Mapping[str, tuple[str, ...]]) -> str:
    lines = [f"# {title}", "", words, ""]
    for heading, names in parts.items():
        lines += [f"## {heading}", "", "```{eval-rst}"]
        for name in names:
            if name.rpartition(".")[2][0].islower():
                lines += [f".. autofunction:: {name}", ""]
            else:
                lines += [f".. autoclass:: {name}", "   :members:", ""]
        lines += ["```", ""]
    return "\n".join(lines)
