"""What engines call their steps, and what that says."""

from __future__ import annotations

import pytest

from gapless.runtime.analysis.traces.step_names import step_of


@pytest.mark.parametrize(
    ("name", "engine", "counts"),
    [
        ("execute_context_2(256)_generation_3(3)", "vLLM", (2, 256, None, 3, 3, None)),
        (
            "execute_256_context_1(sq253sk509sqsq64009sqsk128777)_generation_3(sq3sk808sqsq3sqsk808)",
            "vLLM",
            (1, 253, 256, 3, 3, 808),
        ),
        ("execute_9_context_0(sq0sk0sqsq0sqsk0)_generation_3(sq9sk808sqsq27sqsk2424)", "vLLM", (0, 0, 0, 3, 9, None)),
        ("step[EXTEND bs=17 toks=8192]", "SGLang", (17, 8192, None, 0, 0, None)),
        ("step[DECODE bs=63]", "SGLang", (0, 0, None, 63, 63, None)),
        ("step[mixed bs=5 ext=100 dec=4]", "SGLang", (1, 100, None, 4, 4, None)),
        ("step[MIXED bs=5]", "SGLang", (None, None, None, None, None, None)),
        ("step[IDLE bs=0]", "SGLang", (0, 0, None, 0, 0, None)),
        ("forward_step", "Megatron-LM", (None, None, None, None, None, None)),
    ],
)
def test_names(name: str, engine: str, counts: tuple[int | None, ...]) -> None:
    found = step_of(name, 1.0, 2.0)
    assert found is not None
    step, by = found
    assert by == engine
    assert (step.start, step.end, step.label) == (1.0, 2.0, name)
    assert (
        step.prefill_requests,
        step.prefill_tokens,
        step.prefill_prefix,
        step.decode_requests,
        step.decode_tokens,
        step.decode_context,
    ) == counts
    assert step.is_empty == (counts[1] == counts[4] == 0)


@pytest.mark.parametrize("name", ["aten::mm", "ProfilerStep#3", "gpu_model_runner: forward", "scheduler.step"])
def test_other_annotations_are_no_steps(name: str) -> None:
    assert step_of(name, 0.0, 1.0) is None
