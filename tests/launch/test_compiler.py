"""The compiler's process: what is wrong is said, what takes too long or crashes it ends alone, and it starts anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.launch.server.compiler import Compiler
from gapless.models.grammar import Grammars

RULES = 3000
SECONDS = 0.2  # the regex takes about one
CRASHING = " ".join(f"r{n}" for n in range(RULES)) + "".join(
    f'\nr{n}: "x{n}" | "y" r{(n + 1) % RULES}' for n in range(RULES)
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    found = Compiler((None, 512, (257,)))
    yield found
    found.close()


def test_what_takes_too_long_or_crashes_is_refused_and_the_next_compiles(compiler: Compiler) -> None:
    async def check() -> None:
        for wanted, named in (
            (StructuredOutputs(regex="((a{1000}){1000}){100}"), "regex"),
            (StructuredOutputs(grammar=f"start: {CRASHING}"), "grammar"),
            (StructuredOutputs(json={"type": "strin"}), "json: Invalid type"),
        ):
            with pytest.raises(ConfigError, match=rf"^sampling\.structured_outputs\.{named}[^\n]*$"):
                await compiler.ask(partial(Grammars.check, wanted=wanted), wanted.kind, SECONDS)
            await compiler.check(StructuredOutputs(regex="a+"))
            beside = StructuredOutputs(choice=tuple(f"choice {n}" for n in range(1000)))
            await asyncio.gather(compiler.check(beside), compiler.check(beside))

    asyncio.run(check())


def test_a_model_without_a_tokenizer_has_none() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Compiler(("none", 512, (257,))).start()
