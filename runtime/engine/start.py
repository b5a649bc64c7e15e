"""Starts the pipeline of a plan: a rank in this process, or ranks under a launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...conf.schema import EngineConfig
from ...kernels.cpp_build import compile_for
from ..pipeline.handshake import Setup
from ..pipeline.launcher import Launcher, check_launcher, find_launcher
from ..pipeline.local import LocalPipeline
from ..pipeline.protocol import LivePipeline
from ..pipeline.remote import RemotePipeline
from .fewer_stages import plan_fewer_stages
from .plan import Plan, make_setup


def start_pipeline(
    config: EngineConfig, plan: Plan, launcher: Launcher | None, on_progress: Callable[[str], None]
) -> LivePipeline:
    """Start the pipeline of a plan. `launcher` overrides the one in `config`.

    Raises:
        ConfigError: the launcher cannot place the ranks here. PipelineError: a rank failed to start.
    """
    setup = make_setup(config, plan)
    if config.hardware.device == "cpu" and config.model.kernels != "torch":
        compile_for(plan.dtype)  # here, where the user sees it; ranks on other nodes do the same
    if config.parallel.started_by == "local" and launcher is None:
        check_launcher(config.parallel, config.hardware)
        on_progress("loading the model in this process")
        device = "cuda:0" if config.hardware.device == "cuda" else "cpu"
        return LocalPipeline(setup, device, looks_ahead=config.parallel.depth is None)
    starter = launcher or find_launcher(config.parallel.started_by)
    starter.check(config.parallel, config.hardware)

    def fewer_stages(num_stages: int) -> Setup:
        smaller, new = plan_fewer_stages(config, plan, num_stages)
        return make_setup(smaller, replace(new, limits=plan.limits))

    return RemotePipeline(starter, config.parallel, config.hardware, config.cluster, setup, on_progress, fewer_stages)
