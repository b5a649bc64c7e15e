"""The Python API for offline inference: a model on a pipeline that generates text from prompts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ...conf.build import build, compose_engine
from ...conf.policies import SchedulerConfig
from ...conf.sampling import SamplingParams
from ...conf.schema import EngineConfig
from ...conf.workloads import WorkloadConfig
from ...models.chat_template import Conversation
from ...models.generation_config import sampling_defaults
from ...models.tokenizer import Tokenizer
from ..core.messages import TokenLogprobs
from ..core.numbers import counted
from ..core.request import Request
from ..core.run_record import RunRecord
from ..core.work_item import WorkItem
from ..pipeline.launcher import Launcher
from .coordinator import Coordinator, TokenEvent
from .engine_core import EngineCore
from .intake import Intake, Prompt
from .output_text import OutputText, named_prompt
from .outputs import CompletionOutput, RequestOutput
from .plan import Plan, make_plan
from .replay import exactly, make_request, replay
from .start import start_pipeline

_log = logging.getLogger(__name__)


class LLM:
    """A model served by pipeline and tensor parallel ranks, or by one rank in this process.

    For example::

        with LLM(model="path/to/folder", pp=2, scheduler="token_budget", launcher="ray") as llm:
            for output in llm.generate(["def main("], SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    `model` is a Hugging Face folder or a name of `conf/model`, `scheduler` a policy name or a file with your own
    policy (`docs/policies.md`). Set any other config key by its dotted name, `**{"scheduler.chunk": 48}`. Without a
    `launcher`, a single rank runs in this process and several run on Ray.

    Raises:
        ConfigError: a key, a value or the checkpoint is wrong; nothing has been started.
        PipelineError: a rank failed to start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        pp: int = 1,
        tp: int = 1,
        scheduler: str = "equal_time",
        launcher: str | Launcher | None = None,
        hardware: str = "cpu",
        **overrides: Any,
    ) -> None:
        name = launcher if isinstance(launcher, str) or launcher is None else "ray"
        config = compose_engine(
            model=model, pp=pp, tp=tp, scheduler=scheduler, launcher=name, hardware=hardware, overrides=overrides
        )
        self._start(config, launcher if not isinstance(launcher, str) else None, _log.info)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        launcher: Launcher | None = None,
        on_progress: Callable[[str], None] = _log.info,
        policies: Sequence[SchedulerConfig] = (),
        plans: Mapping[SchedulerConfig, Plan] | None = None,
    ) -> LLM:
        """Start from a complete config.

        Args:
            config: validated engine config.
            launcher: overrides `config.parallel.launcher`.
            on_progress: called with a line of text at each step of the start. By default the line is logged.
            policies: to be passed to `reset` later; pipeline depth and cache size cover the needs of all of them.
            plans: plans of `config` made so far, by policy.
        """
        self = cls.__new__(cls)
        self._start(config, launcher, on_progress, policies, plans)
        return self

    def _start(
        self,
        config: EngineConfig,
        launcher: Launcher | None,
        on_progress: Callable[[str], None],
        policies: Sequence[SchedulerConfig] = (),
        plans: Mapping[SchedulerConfig, Plan] | None = None,
    ) -> None:
        every = dict(plans or {})
        for policy in (config.scheduler, *policies):
            every[policy] = every.get(policy) or make_plan(replace(config, scheduler=policy), quiet=bool(every))
        shared = replace(
            every[config.scheduler],
            num_blocks=max(plan.num_blocks for plan in every.values()),
            limits=max((plan.limits for plan in every.values()), key=lambda limits: limits.depth.most),
        )
        self._intake = Intake(shared)
        self._default_params = build(SamplingParams, sampling_defaults(config.model), "sampling")
        pipeline = start_pipeline(config, shared, launcher, on_progress)
        self._ids = itertools.count()
        self._closed = False
        self._replaying = False
        self._texts: dict[int, _Text] = {}
        self._core = EngineCore(config, every, pipeline, self._check_stop)
        self._forget_record()

    def reset(self, scheduler: SchedulerConfig | None = None, *, warm: bool = False) -> None:
        """Begin a new run, with a new record, on the running pipeline.

        Args:
            scheduler: the new run's policy; None: unchanged.
            warm: keep the policy's learned state and the prefix cache.

        Raises:
            ValueError: a request is unfinished.
        """
        if self._texts or self._replaying:
            raise ValueError(f"unfinished requests: {len(self._texts)}" if self._texts else "a replay is unfinished")
        self._core.reset(scheduler, warm=warm)
        self._forget_record()

    def _forget_record(self) -> None:
        self._known_faults = (0, False)

    @property
    def config(self) -> EngineConfig:
        """The current config: with the newest policy and the remaining stages."""
        return self._core.config

    @property
    def plan(self) -> Plan:
        """The plan made from `config`."""
        return self._core.plan

    @property
    def _coordinator(self) -> Coordinator:
        return self._core.coordinator

    @property
    def record(self) -> RunRecord:
        """The record since the start, or since `reset`, for the ledger and the report."""
        return self._coordinator.record

    @property
    def tokenizer(self) -> Tokenizer:
        """The configured tokenizer, for encoding prompts and decoding outputs."""
        return self._intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the params for prompts without any: the checkpoint's (`model.generation_config`), else ours."""
        return self._default_params

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt plus output, that the model supports."""
        return self.plan.max_model_len

    @property
    def where(self) -> list[str]:
        """Node, process and device of each rank."""
        return self._core.pipeline.where

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts to completion and return the outputs in prompt order.

        Args:
            prompts: one or several, each a text, token ids, a `Conversation` or `{"prompt": text}`, as in vLLM.
            sampling_params: for all prompts, or one per prompt; None: `get_default_sampling_params`.

        Raises:
            ValueError: a prompt (named by number) is empty, too long, or outside the vocabulary.
            PipelineError: the pipeline failed.
        """
        results = self._submit(prompts, sampling_params)
        for _ in self._run(results):
            pass
        return [r.output for r in results]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for conversations: applies the model's chat template.

        `stream` and `generate` also accept a `Conversation`.

        Args:
            messages: one conversation, each message with `role` and `content`, or a list of conversations.
            sampling_params: for all conversations, or one per conversation.

        Raises:
            ValueError: the model has no chat template, the template rejects the messages, or as in `generate`.
            PipelineError: the pipeline failed.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        each = [messages] if is_one else messages
        return self.generate([Conversation(of_one) for of_one in each], sampling_params)  # type: ignore[arg-type]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Like `generate`, but yield a snapshot of a request's output whenever it has new tokens.

        Prompts are checked on the call, not on the first `next`. Closing the iterator early aborts the unfinished
        requests.
        """
        batches = self._run(self._submit(prompts, sampling_params))
        next(batches)  # start the generator, so that dropping it before the first output aborts the requests
        return (r.snapshot() for batch in batches for r in batch)

    def replay(self, items: Iterable[WorkItem], workload: WorkloadConfig | None = None) -> Iterator[list[TokenEvent]]:
        """Run requests that arrive over time, with greedy sampling and exact output lengths.

        Yields the tokens of each micro-batch, without text.

        Each request is submitted when due, in a closed loop if `workload` has one. Closing the iterator early aborts
        unfinished requests.

        Raises:
            ValueError: a request (named by number) does not fit the model or the cache, or others are unfinished.
            PipelineError: the pipeline failed, or a request did not get all its tokens.
        """
        if self._closed:
            raise ValueError("this LLM is closed")
        if self._texts or self._replaying:
            raise ValueError("other requests are unfinished")
        self._replaying = True
        try:
            for events in replay(self._coordinator, self._checked(items), self._timed, workload):
                self._watch()
                yield events
        finally:
            self._replaying = False

    def close(self) -> None:
        """Shut down all ranks. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._core.pipeline.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Result]:
        if self._closed:
            raise ValueError("this LLM is closed")
        if self._replaying:
            raise ValueError("a replay is unfinished")
        taken = self._intake.read(prompts, self._default_params if params is None else params)
        now = self._coordinator.clock.now()
        return [self._accept(number, *each, now) for number, each in enumerate(taken)]

    def _accept(self, number: int, text: str | None, ids: list[int], params: SamplingParams, now: float) -> _Result:
        requests = []
        for index in range(params.n):
            is_first = index == 0 or params.prompt_logprobs is None
            own = params if is_first else replace(params, prompt_logprobs=None)
            requests.append(self._core.make_request(next(self._ids), ids, own, now, index=index))
        result = _Result(number, text, ids, requests)
        for request, completion in zip(requests, result.output.outputs, strict=True):
            self._texts[request.id] = _Text(request, completion, self.tokenizer, result)
            self._coordinator.add(request)
        return result

    def _run(self, results: list[_Result]) -> Iterator[list[_Result]]:
        """Drive the coordinator until all `results` are finished. Yield an empty list, then lists of updated results.

        Several calls may be interleaved: each micro-batch has tokens for all of them, and each call yields its own.
        """
        news: dict[int, _Result] = {}
        for result in results:
            result.news = news
        try:
            yield []
            while news or not all(r.output.finished for r in results):
                if not news:
                    self._step()
                fresh = list(news.values())
                news.clear()
                yield fresh
        finally:
            for result in results:
                for request in result.requests:
                    if not request.is_finished:
                        self._coordinator.abort(request)
                        self._texts.pop(request.id).finish(request.finish_reason)

    def _step(self) -> None:
        for event in self._coordinator.step(self._coordinator.clock.now() + 1.0):
            text = self._texts[event.request.id]
            text.completion.cached_tokens = event.request.record.cached_tokens
            if event.token is not None:
                text.take(event.token, event.logprobs)
                text.take_prompt()
            if event.is_last:
                text.finish(event.request.finish_reason)
                del self._texts[event.request.id]
            text.result.news[text.result.output.request_id] = text.result
        self._watch()
        self._coordinator.check_progress()

    def _watch(self) -> None:
        """Log a new or repaired fault."""
        record = self.record
        known = (len(record.faults), self._coordinator.is_recovering)
        if known == self._known_faults:
            return
        fault = record.faults[-1]
        if known[0] != self._known_faults[0]:
            _log.warning("%s; the pipeline is recovering, %s waiting", fault.text, counted(fault.requests, "request"))
        if fault.up is not None:
            _log.warning("the pipeline has recovered, %.1f s after its last sign of progress", fault.seconds)
        self._known_faults = known

    def _checked(self, items: Iterable[WorkItem]) -> Iterator[WorkItem]:
        for number, item in enumerate(items):
            self._intake.check(number, item.prompt, exactly(item.output_len))
            yield item

    def _timed(self, item: WorkItem, arrival: float) -> Request:
        return make_request(next(self._ids), item, arrival, self.max_model_len)

    def _check_stop(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> str | None:
        if not request.params.stop:
            return None
        text = self._texts[request.id]
        text.take(token, logprobs)
        return "stop" if text.stopped else None


class _Result:
    """A user's prompt and its `n` requests. `news`: results of the same call with tokens not yet yielded."""

    def __init__(self, number: int, prompt: str | None, ids: list[int], requests: list[Request]) -> None:
        self.requests = requests
        self.news: dict[int, _Result] = {}
        outputs = [CompletionOutput(i) for i in range(len(requests))]
        self.output = RequestOutput(requests[0].id, number, prompt, ids, outputs)

    def snapshot(self) -> RequestOutput:
        outputs = [
            replace(o, token_ids=[*o.token_ids], logprobs=None if o.logprobs is None else [*o.logprobs])
            for o in self.output.outputs
        ]
        return replace(self.output, outputs=outputs)


class _Text(OutputText):
    """The output text of one request."""

    def __init__(self, request: Request, completion: CompletionOutput, tokenizer: Tokenizer, result: _Result) -> None:
        super().__init__(completion, request.params, tokenizer)
        self.request = request
        self.result = result

    def take_prompt(self) -> None:
        """Copy the prompt's log-probabilities to the output, once, if requested."""
        found, output = self.request.prompt_logprobs, self.result.output
        if found is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = named_prompt(self._tokenizer, output.prompt_token_ids, found)

    def take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add the request's newest token, unless the stop check has done so already."""
        if self.request.num_output > len(self.completion.token_ids):
            self.push(token, logprobs, is_stop_token=self.request.finish_reason_after(token) == "stop")
