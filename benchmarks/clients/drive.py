"""Drives a library: `drive.py CLIENT CASE URL PROMPT`. Prints the last answer, or the library's error."""

from __future__ import annotations

import json
import sys
from typing import Any

CLIENT, CASE, URL, PROMPT = sys.argv[1:5]
V1 = f"{URL}/v1"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: where.
    """
    return "R41N"


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(create: Any) -> None:
    """Drive an OpenAI-compatible chat completions function."""
    if CASE == "loop":
        message = create(messages=MESSAGES, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_weather(**json.loads(call.function.arguments)),
        }
        after = [*MESSAGES, message.model_dump(exclude_none=True), result]
        print(create(messages=after, tools=[TOOL]).choices[0].message.content)
    elif CASE == "stream":
        chunks = [
            chunk.choices[0].delta.content or "" for chunk in create(messages=MESSAGES, stream=True) if chunk.choices
        ]
        assert sum(map(bool, chunks)) > 2, chunks
        print("".join(chunks))
    else:
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        asked: dict[str, Any] = {"response_format": form, "tools": [TOOL]} if CASE == "schema" else {}
        print(create(messages=MESSAGES, **asked).choices[0].message.content)


def drive_openai() -> None:
    import functools

    import openai

    chat(functools.partial(openai.OpenAI(max_retries=0).chat.completions.create, model="model"))


def drive_litellm() -> None:
    import functools

    import litellm

    chat(functools.partial(litellm.completion, model="openai/model", api_base=V1, api_key="none"))


def drive_openai_agents() -> None:
    import asyncio

    import agents
    import pydantic

    agents.set_tracing_disabled(True)

    class City(pydantic.BaseModel):
        city: str

    tools: list[Any] = [agents.function_tool(get_weather)] if CASE in ("loop", "schema") else []
    agent = agents.Agent(name="a", model="model", tools=tools, output_type=City if CASE == "schema" else None)

    async def run() -> None:
        if CASE != "stream":
            print((await agents.Runner.run(agent, PROMPT)).final_output)
            return
        ran = agents.Runner.run_streamed(agent, PROMPT)
        async for event in ran.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                print(event.data.delta, end="")

    asyncio.run(run())


def drive_pydantic_ai() -> None:
    import pydantic
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel

    class City(pydantic.BaseModel):
        city: str

    form: Any = pydantic_ai.NativeOutput(City) if CASE == "schema" else str
    agent: Any = pydantic_ai.Agent(OpenAIChatModel("model"), output_type=form, tools=[get_weather])
    print(agent.run_stream_sync(PROMPT).get_output() if CASE == "stream" else agent.run_sync(PROMPT).output)


def drive_instructor() -> None:
    import instructor
    import openai
    import pydantic

    class City(pydantic.BaseModel):
        city: str

    if CASE in ("loop", "overflow"):
        made = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.TOOLS)
    else:
        made = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
    asked: dict[str, Any] = {"model": "model", "messages": MESSAGES, "max_retries": 1}
    if CASE == "stream":
        *_, last = made.chat.completions.create_partial(response_model=City, **asked)
        print(last)
    else:
        print(made.chat.completions.create(response_model=City, **asked))


def drive_anthropic() -> None:
    import anthropic

    tool = {"name": "get_weather", "description": "d", "input_schema": TOOL["function"]["parameters"]}
    asked: dict[str, Any] = {"model": "model", "messages": MESSAGES, "max_tokens": 200, "tools": [tool]}
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    if CASE == "loop":
        ran = client.beta.messages.tool_runner(**asked | {"tools": [anthropic.beta_tool(get_weather)]})
        *_, last = ran
        print(last)
    elif CASE == "stream":
        with client.messages.stream(**asked) as stream:
            chunks = list(stream.text_stream)
        assert sum(map(bool, chunks)) > 2, chunks
        print("".join(chunks))
    else:
        form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}} if CASE == "schema" else {}
        print(client.messages.create(**asked | form).content[-1].text)


def drive_crewai() -> None:
    import crewai
    import pydantic
    from crewai.tools import tool

    class City(pydantic.BaseModel):
        city: str

    model = crewai.LLM(model="openai/model", base_url=V1, api_key="none", stream=CASE == "stream", max_retries=0)
    tools = [tool("get_weather")(get_weather)] if CASE in ("loop", "schema") else []
    agent = crewai.Agent(role="r", goal="g", backstory="b", llm=model, tools=tools, max_iter=3)
    print(agent.kickoff(PROMPT, response_format=City if CASE == "schema" else None).raw)


def drive_llama_index() -> None:
    import asyncio

    import pydantic
    from llama_index.core.agent.workflow import AgentStream, FunctionAgent
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    class City(pydantic.BaseModel):
        city: str

    model = OpenAILike(
        model="model",
        api_base=V1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_retries=0,
    )
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_weather)], llm=model)

    async def run() -> None:
        ran = agent.run(PROMPT)
        chunks = [event.delta async for event in ran.stream_events() if isinstance(event, AgentStream)]
        assert CASE != "stream" or sum(map(bool, chunks)) > 2, chunks
        print(await ran)

    if CASE == "schema":
        print(model.as_structured_llm(City).complete(PROMPT).raw)
    else:
        asyncio.run(run())


def drive_langgraph() -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="model", max_retries=0)
    if CASE == "stream":
        chunks = [chunk.content for chunk in model.stream(PROMPT)]
        assert sum(map(bool, chunks)) > 2
        print("".join(map(str, chunks)))
    elif CASE == "schema":
        strict = {"type": "function", "function": TOOL["function"] | {"strict": True, "parameters": SCHEMA}}
        form = model.with_structured_output(
            SCHEMA | {"title": "city"}, method="json_schema", strict=True, tools=[strict], include_raw=True
        )
        print(form.invoke(PROMPT))
    else:
        print(create_react_agent(model, [tool(get_weather)]).invoke({"messages": MESSAGES})["messages"][-1].content)


def drive_smolagents() -> None:
    import smolagents

    model = smolagents.OpenAIServerModel(model_id="model", api_base=V1, api_key="none")
    if CASE == "stream":
        print("".join(delta.content or "" for delta in model.generate_stream(MESSAGES)))
    elif CASE == "schema":
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        print(model.generate(MESSAGES, response_format=form).content)
    else:
        agent = smolagents.ToolCallingAgent([smolagents.tool(get_weather)], model, max_steps=3)
        print(agent.run(PROMPT))


def drive_dspy() -> None:
    import asyncio

    import dspy

    class Weather(dspy.Signature):
        question: str = dspy.InputField()
        city: str = dspy.OutputField()

    adapter = dspy.ChatAdapter() if CASE == "stream" else dspy.JSONAdapter()
    dspy.configure(lm=dspy.LM("openai/model", api_base=V1, api_key="none", cache=False, num_retries=0), adapter=adapter)
    if CASE == "loop":
        print(dspy.ReAct(Weather, tools=[get_weather], max_iters=1)(question=PROMPT).city)
    elif CASE == "stream":
        listener = dspy.streaming.StreamListener(signature_field_name="city")
        ran: Any = dspy.streamify(dspy.Predict(Weather), stream_listeners=[listener])

        async def run() -> None:
            chunks = [each async for each in ran(question=PROMPT)]
            assert sum(isinstance(each, dspy.streaming.StreamResponse) for each in chunks) > 2, chunks
            print(chunks[-1].city)

        asyncio.run(run())
    else:
        print(dspy.Predict(Weather)(question=PROMPT).city)


def drive_outlines() -> None:
    import openai
    import outlines
    import pydantic

    class City(pydantic.BaseModel):
        city: str

    model: Any = outlines.from_vllm(openai.OpenAI(max_retries=0), "model")
    if CASE == "stream":
        chunks = list(model.stream(PROMPT))
        assert sum(map(bool, chunks)) > 2, chunks
        print("".join(chunks))
    else:
        print(model(PROMPT, City) if CASE == "schema" else model(PROMPT))


def drive_guidance() -> None:
    import guidance
    from guidance.models.experimental import VLLMModel

    model: Any = VLLMModel("model", base_url=V1, api_key="none", echo=False)
    with guidance.user():
        model += PROMPT
    if CASE == "loop":
        with guidance.assistant():
            model += guidance.gen(tools=[get_weather])
    with guidance.assistant():
        model += guidance.json("answer", schema=SCHEMA) if CASE == "schema" else guidance.gen("answer")
    print(model["answer"])


if __name__ == "__main__":
    globals()[f"drive_{CLIENT}"]()
