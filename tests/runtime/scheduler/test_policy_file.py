"""A policy in a file of the user's own: the documented one, audited on random workloads, simulated and real; errors."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless import LLM
from gapless.conf.build import build, compose_engine, to_mapping
from gapless.conf.errors import ConfigError
from gapless.conf.policies import Depth, SchedulerConfig
from gapless.conf.policy_file import policy_mapping
from gapless.conf.sampling import SamplingParams
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.messages import MicroBatchMessage
from gapless.runtime.core.request import Request
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.pipeline.protocol import PipelineError
from gapless.runtime.scheduler import Limits, Scheduler
from gapless.runtime.scheduler.policies import find_policy, make_scheduler
from tests.support.closed_loops import loop
from tests.support.tiers import examples
from tests.support.virtual_pipeline import VirtualPipeline

DOCUMENT = Path(__file__).parents[3] / "docs" / "policies.md"
NAME = "shortest_rest_first.py"


def documented() -> str:
    (source,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return source


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / NAME
    path.write_text(documented(), encoding="utf-8")
    return path


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_the_documented_policy_is_short() -> None:
    assert len([line for line in documented().splitlines() if line.strip()]) <= 30


def test_it_is_a_config_with_its_own_keys(policy_file: Path) -> None:
    mapping = policy_mapping(str(policy_file))
    assert mapping == {
        "name": NAME,
        "file": str(policy_file),
        "batch": None,
        "max_batch": 256,
        "order": "fcfs",
        "drafts": 0,
        "chunk": 256,
    }
    config = build(SchedulerConfig, mapping | {"chunk": 64}, "scheduler")
    assert to_mapping(config) == mapping | {"chunk": 64}
    assert build(SchedulerConfig, to_mapping(config)) == config
    assert hash(config) != hash(build(SchedulerConfig, mapping))
    assert find_policy(config).__name__ == "ShortestRestFirst"
    with pytest.raises(ConfigError, match=r"^scheduler\.chunk='x': must be an integer$"):
        build(SchedulerConfig, mapping | {"chunk": "x"}, "scheduler")
    with pytest.raises(ConfigError, match=r"^scheduler\.chnk: unknown key; did you mean 'scheduler\.chunk'\?$"):
        build(SchedulerConfig, mapping | {"chnk": 1}, "scheduler")


@settings(max_examples=examples(60))
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.floats(0, 0.5)), min_size=1, max_size=12),
    batch=st.integers(1, 5),
    depth=st.integers(1, 4),
    stages=st.integers(1, 3),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(25, 60),
    seed=st.integers(0, 99),
)
def test_it_keeps_every_bound(
    requests: list[tuple[int, int, float]],
    batch: int,
    depth: int,
    stages: int,
    chunk: int,
    num_blocks: int,
    seed: int,
    policy_file: Path,
) -> None:
    rng = random.Random(seed)

    def stage_time(micro_batch: MicroBatchMessage, stage: int) -> float:
        return (0.01 + 0.001 * micro_batch.num_tokens) * rng.uniform(0.5, 2.0)

    pipeline = VirtualPipeline(stages, depth, num_blocks, 4, stage_time)
    config = build(SchedulerConfig, policy_mapping(str(policy_file)) | {"chunk": chunk}, "scheduler")
    scheduler = make_scheduler(
        config, Limits(batch, Depth.fixed(depth), num_stages=stages), BlockPool(num_blocks, 4, 25)
    )
    coordinator = Coordinator(pipeline, scheduler)
    waiting = [
        Request(number, [1] * prompt, SamplingParams(max_tokens=output, ignore_eos=True), arrival=at)
        for number, (prompt, output, at) in enumerate(sorted(requests, key=lambda r: r[2]))
    ]
    all_of_them = list(waiting)
    while waiting or coordinator.has_work:
        while waiting and (waiting[0].arrival <= pipeline.now_s or not coordinator.has_work):
            pipeline.now_s = max(pipeline.now_s, waiting[0].arrival)
            coordinator.add(waiting.pop(0))
        coordinator.step(pipeline.now_s + 1.0)
    assert all(request.num_output == request.params.max_tokens for request in all_of_them)
    assert scheduler.pool.num_free == num_blocks
    assert all(len(s.chunks) <= 1 and len(s.chunks) + len(s.decodes) <= batch for s in pipeline.micro_batches)
    Ledger(coordinator.record).check()


def test_short_prompts_overtake_long_ones(policy_file: Path) -> None:
    config = build(SchedulerConfig, policy_mapping(str(policy_file)) | {"chunk": 8}, "scheduler")
    scheduler = make_scheduler(config, Limits(4, Depth.fixed(1)), BlockPool(100, 4, 25))
    for number, prompt in enumerate((50, 9, 20)):
        scheduler.add(Request(number, [1] * prompt, SamplingParams(max_tokens=2)))
    taken = []
    for _ in range(6):
        batch = scheduler.next_batch()
        assert batch is not None
        taken += [(chunk.request.id, chunk.length) for chunk in batch.chunks]
        scheduler.completed(batch)
    assert taken == [(1, 8), (1, 1), (2, 8), (2, 8), (2, 4), (0, 8)]


def test_it_runs_a_real_model_and_changes_no_token(policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(policy_file.parent)
    params = SamplingParams(max_tokens=6)
    prompts = [[5 + n] * (10 * n + 3) for n in range(5)]
    outputs = []
    for scheduler in ("sarathi", f"./{NAME}"):
        with LLM("shipped", scheduler=scheduler, **{"scheduler.chunk": 16, "cache.num_blocks": 300}) as llm:
            outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            assert llm.config.scheduler.name == scheduler.removeprefix("./")
            Ledger(llm.record).check()
    assert outputs[0] == outputs[1]


def test_a_policy_that_never_takes_anything_ends_a_real_run_too(tmp_path: Path) -> None:
    idle = written(
        tmp_path,
        "from gapless.runtime.scheduler import Scheduler\n\n"
        "class Idle(Scheduler):\n    def fill(self, batch):\n        pass\n",
    )
    with LLM("tiny", scheduler=idle, **{"cache.num_blocks": 64}) as llm:
        with pytest.raises(PipelineError, match=r"^scheduler stalled: 2 unfinished requests, none in"):
            llm.generate([[5], [6, 7]])
        with pytest.raises(PipelineError, match=r"^scheduler stalled: 1 unfinished requests"):
            list(llm.replay([WorkItem([5], 3, 0.0), WorkItem([5], 3, 0.0)], workload=loop(1)))


def test_a_policy_without_keys_and_one_over_ours(tmp_path: Path) -> None:
    bare = written(
        tmp_path,
        "from gapless.runtime.scheduler import Scheduler\n\n"
        "class One(Scheduler):\n    def fill(self, batch):\n        pass\n",
    )
    assert to_mapping(build(SchedulerConfig, policy_mapping(bare))).keys() == {
        "name",
        "file",
        "batch",
        "max_batch",
        "order",
        "drafts",
    }
    over = written(
        tmp_path,
        "from gapless.conf.policies import EqualTimeConfig as Config\n"
        "from gapless.runtime.scheduler.policies.equal_time import EqualTime\n\n"
        "class Mine(EqualTime):\n    pass\n",
        "over.py",
    )
    config = build(SchedulerConfig, policy_mapping(over) | {"chunk": "auto"})
    assert config.depth(4) == Depth(4, 5)
    assert issubclass(find_policy(config), Scheduler)
    assert make_scheduler(config, Limits(2, Depth.fixed(5), num_stages=4), BlockPool(10, 4, 5)).depth == 5


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    def chunk(value: int) -> Any:
        text = documented().replace("chunk: int = 256", f"chunk: int = {value}") + "#" * value
        return policy_mapping(written(tmp_path, text))["chunk"]

    assert (chunk(3), chunk(4)) == (3, 4)


HEAD = "from gapless.runtime.scheduler import Scheduler, SchedulerConfig\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "must hold one class that extends Scheduler; it holds none"),
        (
            f"{HEAD}class A(Scheduler):\n    def fill(self, batch): ...\n"
            "class B(Scheduler):\n    def fill(self, b): ...\n",
            "must hold one class that extends Scheduler; it holds A, B",
        ),
        (f"{HEAD}class A(Scheduler):\n    def fil(self, batch): ...\n", "A lacks fill"),
        (
            f"{HEAD}class Config(SchedulerConfig):\n    chunk: int = 3\n",
            "Config must be a frozen dataclass that extends SchedulerConfig",
        ),
        (f"{HEAD}Config = 3\n", "Config must be a frozen dataclass that extends SchedulerConfig"),
        (
            f"{HEAD}import dataclasses\n\n@dataclasses.dataclass(frozen=True, kw_only=True)\n"
            "class Config(SchedulerConfig):\n    chunk: int\n",
            "Config.chunk must have a default",
        ),
        ("a = 1\nb = nope\n", r":2: NameError: name 'nope' is not defined"),
        ("a = 1\n\nb = (\n", r":3: SyntaxError: '(' was never closed"),
        ("import nothing_such\n", ":1: ModuleNotFoundError: No module named 'nothing_such'"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as failure:
        find_policy(build(SchedulerConfig, policy_mapping(file)))
    assert str(failure.value) == f"{file}{line if line.startswith(':') else f': {line}'}"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name, what in (("none.py", "no such file"), ("folder.py", "is a folder; give the file")):
        with pytest.raises(ConfigError, match=rf"^scheduler=.*{name}: {what}$"):
            compose_engine(model="shipped", scheduler=str(tmp_path / name))
