"""What a request of the API asks for: its prompts as token ids, how to sample, and the form of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...conf.sampling import SamplingParams
from .answers import Answer
from .requests import SamplingBody, each_output


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. Its outputs are `body.n` of each prompt."""

    body: SamplingBody
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    answer: Answer

    @property
    def outputs(self) -> list[tuple[Sequence[int], SamplingParams]]:
        """The prompt and the parameters of each output, in their order."""
        return [(prompt, each) for prompt in self.prompts for each in each_output(self.params, self.body.n)]
