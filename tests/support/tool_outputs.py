"""Outputs of models that call tools, as each format writes them, and what they mean."""

# ruff: noqa: E501, RUF001

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
CITY, DAYS = {"city": 'Par</tool_call>is "é" }{ \\'}, {"city": "Rome", "days": 3}
AS_JSON = r'{"city": "Par</tool_call>is \"é\" }{ \\"}'


@dataclass(frozen=True)
class Output:
    """An output in a format, with what a client is to get of it: text, reasoning and calls."""

    id: str
    format: str
    raw: str
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    in_reasoning: bool = False


TWO = [("get_weather", CITY), ("get_weather", DAYS)]
OUTPUTS = [
    Output("text", "hermes", "  Hello <b>you</b>, <tool is no call\n", "  Hello <b>you</b>, <tool is no call\n"),
    Output(
        "hermes",
        "hermes",
        "Let me see.\n\n<tool_call>\n" + '{"name": "get_weather", "arguments": ' + AS_JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}\n</tool_call>',
        "Let me see.",
        calls=TWO,
    ),
    Output(
        "hermes reasons",
        "hermes",
        "<think>\nWhich city?\n\nThat <tool_call> one.\n</think>\n\n"
        '<tool_call>{"name":"get_weather","arguments":{"city":"Rome","days":3}}</tool_call>\n',
        reasoning="Which city?\n\nThat <tool_call> one.",
        calls=TWO[1:],
    ),
    Output("reasoning of the prompt", "hermes", "Hm.\n</think>\n\nYes.\n", "Yes.\n", "Hm.", in_reasoning=True),
    Output("no end of reasoning", "hermes", "Hm, </thin", "", "Hm, </thin", in_reasoning=True),
    Output("text behind a call", "hermes", '<tool_call>{"name": "now"}</tool_call>\nDone.', "Done.", calls=[("now", {})]),
    Output("spaces behind such text", "hermes", '<tool_call>{"name": "now"}</tool_call> \n Done. \n ', "Done.",
           calls=[("now", {})]),
    Output("arguments of null", "hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[("now", {})]),
    Output("a line break within a text of JSON", "hermes", '<tool_call>{"name": "now", "arguments": "{\n}"}</tool_call>',
           calls=[("now", {})]),
    Output("arguments as text", "hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
           calls=[("now", {"a": 1})]),
    Output("no call", "hermes", 'It is <tool_call>{"a": 1}</tool_call>', 'It is <tool_call>{"a": 1}</tool_call>'),
    Output("an unfinished call", "hermes", 'So <tool_call>\n{"na', 'So <tool_call>\n{"na'),
    Output("unknown keys", "hermes", '<tool_call>{"id": 7, "name": "now", "x": [1], "arguments": {}}</tool_call>',
           calls=[("now", {})]),
    Output("llama3", "llama3", '{"name": "get_weather", "parameters": ' + AS_JSON + '}; {"type": "function", "name": '
           '"get_weather", "parameters": {"city": "Rome", "days": 3}}', calls=TWO),
    Output("llama3 tag", "llama3", '<|python_tag|>{"name": "now", "parameters": {}}', calls=[("now", {})]),
    Output("an answer in JSON", "json", '{"answer": {"name": "now"}}', '{"answer": {"name": "now"}}'),
    Output("of another name", "json", '{"name": "Ada", "age": 36}\n', '{"name": "Ada", "age": 36}\n'),
    Output("json", "json", '\n{"name": "get_weather", "arguments": ' + AS_JSON + '}\n{"name": "get_weather", '
           '"arguments": {"city": "Rome", "days": 3}}\n', calls=TWO),
    Output("mistral", "mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + AS_JSON + '}, {"name": '
           '"get_weather", "arguments": {"city": "Rome", "days": 3}}]', calls=TWO),
    Output("mistral v11", "mistral_v11", "So.[TOOL_CALLS]get_weather[ARGS]" + AS_JSON + "[TOOL_CALLS]get_weather"
           '[CALL_ID]a1[ARGS]{"city": "Rome", "days": 3}', "So.", calls=TWO),
    Output(
        "deepseek v3",
        "deepseek_v3",
        "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + AS_JSON + "\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{\n  "city": "Rome",\n  "days": 3\n}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Wait.",
        calls=TWO,
    ),
    Output(
        "deepseek v3.1",
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + AS_JSON + "<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        calls=TWO,
    ),
    Output(
        "kimi k2",
        "kimi_k2",
        "Ok <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        + AS_JSON
        + "<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>"
        '{"city": "Rome", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        "Ok",
        calls=TWO,
    ),
    Output(
        "glm 4.5",
        "glm45",
        "\n<think>so</think>\nNow.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "Now.",
        "so",
        [("get_weather", {"city": "12", "days": 3}), ("now", {})],
    ),
    Output(
        "qwen3 coder",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na <b>\n\nc\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[("get_weather", {"city": "a <b>\n\nc", "days": 3}), ("now", {})],
    ),
    Output(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Let me <see>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 3}<|call|>',
        "I look.",
        "Let me <see>.",
        TWO[1:],
    ),
    Output("harmony's other header", "harmony", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
           calls=[("now", {})]),
    Output("harmony's answer", "harmony", "<|channel|>final<|message|>It is 3.<|return|>", "It is 3."),
]  # fmt: skip
