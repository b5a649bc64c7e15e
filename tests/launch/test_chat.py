"""Conversations: in the terminal, in files of prompts, from Python, each through the model's chat template."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import sys
import time
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

import gapless.models
from gapless import LLM, Conversation, SamplingParams
from gapless.launch.cli import main
from gapless.launch.shown_texts import Wrapped
from tests.support.browser import CHROMIUM, DRIVER, browsing
from tests.support.server import serving
from tests.support.tiers import HANGS_S

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{{ '<a>' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the shipped model one with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def outputs(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]


def generate(folder: Path, model: Path, *more: str) -> list[dict[str, object]]:
    run_dir = f"hydra.run.dir={folder / 'run'}"
    keys = (f"outputs={folder / 'out.jsonl'}", "sampling.max_tokens=4", "print_texts=false", run_dir)
    assert main(["generate", f"model={model}", "parallel.threads=1", *keys, *more]) == 0
    return outputs(folder)


def test_rows_of_a_file_are_texts_messages_or_token_ids(model: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    rows = [
        {"prompt": "x"},
        {"messages": messages},
        {"prompt_token_ids": [1, 2]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    text, chat, ids = generate(tmp_path, model, f"prompts={file}")
    assert text["prompt"] == "<user> x\n<a>"
    assert chat["prompt"] == "<system> Be brief.\n<user> x\n<a>"
    assert ids["prompt"] is None
    assert [row.get("messages") for row in (chat, ids)] == [messages, None]

    plain, *_ = generate(tmp_path, model, f"prompts={file}", "chat=false")
    assert plain["prompt"] == "x"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": []}, 'messages: must be a list such as [{"role": "user", "content": "..."}]'),
        ({"messages": [{"content": "x"}]}, "messages[0]: must be an object with a role, such as user, and a content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: must be a text, or a list of parts"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "give one of prompt, messages and pr",
        ),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}, "a request of an OpenAI batch file;"),
        ({"prompt": None}, "give one of prompt, messages and prompt_token_ids"),
        ({"prompt": "x", "max_tokens": 1.5}, "sampling.max_tokens=1.5: must be an integer"),
    ],
)
def test_a_row_that_is_wrong_is_named(
    row: dict[str, object], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    assert main(["generate", f"model={model}", f"prompts={file}"]) == 2
    assert f"rows.jsonl:1: {said}" in capsys.readouterr().err


def test_a_model_without_a_template_takes_no_chat(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", "prompt=x", "chat=true"]) == 2
    assert "chat=true: model=shipped has no chat template; remove chat" in capsys.readouterr().err
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    assert main(["generate", f"prompts={file}"]) == 2
    assert "prompt 0 is a conversation, but the model has no chat template" in capsys.readouterr().err
    assert main(["chat", "model=shipped"]) == 2
    assert "model=shipped: no chat template" in capsys.readouterr().err


def test_a_conversation_in_the_terminal_grows_and_is_reset(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["def f(", "", "and g", "/what", "/reset", "def f(", "x" * 9000, "/quit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    keys = ["sampling.max_tokens=5", "sampling.temperature=0", "parallel.threads=1", f"hydra.run.dir={tmp_path}"]
    assert main(["chat", f"model={model}", "system=Code.", *keys]) == 0
    said = capsys.readouterr().out
    speeds = re.findall(r"^(\d) tokens?, [\d.]+ tok/s, TTFT [\d.]+ s, \d+% idle; truncated by ", said, re.MULTILINE)
    assert speeds == ["5", "5", "5"]
    assert "/what: unknown command" in said
    assert "new conversation" in said
    assert "tokens: the context is 2048" in said
    with (tmp_path / "requests.csv").open() as file:
        prompt_tokens = [int(row.split(",")[1]) for row in file.readlines()[1:]]
    assert prompt_tokens[0] == prompt_tokens[2] < prompt_tokens[1]
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_answer_wraps_between_words_as_it_comes(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Rivers are long. The\n  two 東京 banks  end at averyveryverylongword x"
    paper = Wrapped(Console(highlight=False), 12)
    for at in range(0, len(text), size):
        paper.write(text[at : at + size])
    paper.end()
    lines = ["Rivers are ", "long. The", "  two 東京 ", "banks  end ", "at ", "averyveryverylongword ", "x", ""]
    assert capsys.readouterr().out.split("\n") == lines


@pytest.mark.slow
def test_interrupts_in_a_terminal_drop_a_line_and_stop_an_answer(model: Path, tmp_path: Path) -> None:
    keys = [f"model={model}", "parallel.threads=1", "sampling.max_tokens=2000", f"hydra.run.dir={tmp_path}"]
    process, terminal = pty.fork()
    if not process:
        os.environ["COLUMNS"] = "200"
        os.execv(sys.executable, [sys.executable, "-m", "gapless", "chat", *keys])
    seen = ""

    def comes(text: str, seconds: float = HANGS_S) -> bool:
        nonlocal seen
        deadline = time.monotonic() + seconds
        while text not in seen:
            if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            seen += os.read(terminal, 4096).decode(errors="replace")
        seen = seen.partition(text)[2]
        return True

    def interrupts() -> bool:
        os.write(terminal, b"half a line\x03")
        return comes("> ", 2.0)

    assert comes("> ")
    for _ in range(2):  # neither ends the program
        # readline does not see one that comes after its prompt and before it waits, until the next one
        assert any(interrupts() for _ in range(100))
        time.sleep(1.1)
    os.write(terminal, b"def f(\n")
    assert comes("def f(\r\n")
    time.sleep(1)
    os.write(terminal, b"\x03")
    assert comes("idle; stopped")
    assert comes("> ")
    os.write(terminal, b"\x04")
    assert comes("report.html")
    assert os.waitpid(process, 0)[1] == 0
    os.close(terminal)


def test_conversations_from_python(model: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    params = SamplingParams(max_tokens=4)
    with LLM(model, **{"parallel.threads": 1}) as llm:
        (one,) = llm.chat(messages, params)
        two = llm.chat([messages, messages], params)
        (text,) = llm.generate("<user> x\n<a>", params)
        (mixed,) = [output for output in llm.stream(Conversation(messages), params) if output.finished]
    assert one.prompt == "<user> x\n<a>"
    assert {tuple(each.outputs[0].token_ids) for each in (one, *two, mixed)} == {tuple(text.outputs[0].token_ids)}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_the_live_page_keeps_a_conversation_until_a_new_one_begins(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, f"model={model}", "parallel.threads=1") as server, browsing(tmp_path) as browser:
        server.until_ready()
        browser.open(server.url)
        browser.until("document.getElementById('send').textContent === 'Send'")
        browser.run("document.getElementById('temperature').value = 0; document.getElementById('max-tokens').value = 5")
        asked: list[dict[str, str]] = []
        shown = ""
        for question in ("def f(", "and g"):
            browser.run("document.getElementById('prompt').value = arguments[0]", question)
            browser.run("document.getElementById('answer-note').textContent = ''")
            browser.run("document.getElementById('send').click()")
            browser.until("/^5 tokens/.test(document.getElementById('answer-note').innerText)")
            asked.append({"role": "user", "content": question})
            body = {"messages": asked, "max_tokens": 5, "temperature": 0}
            answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]
            shown += ("\n\n" if shown else "") + question + "\n" + answer["message"]["content"]
            assert browser.run("return document.getElementById('answer').textContent") == shown
            asked.append(answer["message"])
        browser.run("document.getElementById('anew').click()")
        assert browser.run("return document.getElementById('answer').textContent") == ""
