# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""The openai SDK: chats with tools, whole and streamed, its `parse`, and an agent's round trip."""

import json
import sys
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

demo, echo = (OpenAI(base_url=f"{url}/v1", api_key="none") for url in sys.argv[1:3])
ASKED = [{"role": "user", "content": "It was a"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Bath", "London"]
    day: Literal[1, 2, 3]


tool = pydantic_function_tool(GetWeather)
chats = demo.chat.completions

# Embeddings, which this client asks for in base64
embedded = demo.embeddings.create(model="demo", input=["Mr. Darcy", "a fine day"]).data
assert abs(sum(value * value for value in embedded[1].embedding) - 1) < 1e-3

# Whole, streamed, and parsed
required = {"model": "demo", "messages": ASKED, "tools": [tool], "parallel_tool_calls": False}
answer = chats.create(**required, tool_choice="required", seed=1)
(call,) = answer.choices[0].message.tool_calls
assert answer.choices[0].finish_reason == "tool_calls", answer
GetWeather.model_validate_json(call.function.arguments)
with chats.stream(**required, tool_choice="required", seed=1) as stream:
    kinds = {event.type for event in stream}
    streamed = stream.get_final_completion().choices[0].message.tool_calls
assert "tool_calls.function.arguments.delta" in kinds, kinds
assert streamed[0].function.arguments == call.function.arguments
named = {"type": "function", "function": {"name": "GetWeather"}}
parsed = chats.parse(**required, tool_choice=named).choices[0].message.tool_calls[0]
assert isinstance(parsed.function.parsed_arguments, GetWeather)
parsed = chats.parse(model="demo", messages=ASKED, response_format=GetWeather).choices[0].message.parsed
assert isinstance(parsed, GetWeather)

# Responses, the same ways
asked = {"model": "demo", "input": "It was a", "max_output_tokens": 12, "temperature": 0.0}
whole = demo.responses.create(**asked)
assert whole.output_text
assert whole.incomplete_details.reason == "max_output_tokens"
with demo.responses.stream(**asked) as stream:
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == whole.output_text
tools = [{"type": "function", **tool["function"]}]
required = {"model": "demo", "input": "It was a", "tools": tools, "parallel_tool_calls": False}
(call,) = demo.responses.create(**required, tool_choice="required").output
GetWeather.model_validate_json(call.arguments)
named = {"type": "function", "name": "GetWeather"}
with demo.responses.stream(**required, tool_choice=named) as stream:
    kinds = {event.type for event in stream}
    (call,) = stream.get_final_response().output
assert "response.function_call_arguments.delta" in kinds, kinds
GetWeather.model_validate_json(call.arguments)
parsed = demo.responses.parse(model="demo", input="It was a", text_format=GetWeather)
assert isinstance(parsed.output_parsed, GetWeather)

# An agent: the model calls a tool, gets its answer, and answers
arguments = {"city": "Bath", "day": 2}
text = "Let me see.\n<tool_call>" + json.dumps({"name": "GetWeather", "arguments": arguments}) + "</tool_call><eos>"
messages = [{"role": "user", "content": text}]
message = echo.chat.completions.create(model="demo", messages=messages, tools=[tool]).choices[0].message
assert message.content == "Let me see."
assert json.loads(message.tool_calls[0].function.arguments) == arguments
messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains.<eos>"}]
message = echo.chat.completions.create(model="demo", messages=messages, tools=[tool]).choices[0].message
assert (message.content, message.tool_calls) == ("It rains.", None)
items = [{"role": "user", "content": text}]
response = echo.responses.create(model="demo", input=items, tools=tools, instructions="Help.")
assert response.output_text == "Let me see."
call = response.output[1]
assert json.loads(call.arguments) == arguments
items += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "It rains.<eos>"}]
assert echo.responses.create(model="demo", input=items, tools=tools).output_text == "It rains."
