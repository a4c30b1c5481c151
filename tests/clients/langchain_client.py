# /// script
# dependencies = ["langchain-openai==1.7.4", "langchain-core==1.8.3"]
# ///
"""LangChain: `bind_tools`, whole and streamed, an agent's round trip, and `with_structured_output`."""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

demo = ChatOpenAI(model="demo", base_url=f"{sys.argv[1]}/v1", api_key="none")


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Bath", "London"]
    day: Literal[1, 2, 3]


bound = demo.bind_tools([GetWeather], tool_choice="any", strict=True, parallel_tool_calls=False)
(call,) = bound.invoke("It was a", seed=1).tool_calls
assert call["name"] == "GetWeather"
GetWeather.model_validate(call["args"])
whole = None
for chunk in bound.stream("It was a", seed=1):
    whole = chunk if whole is None else whole + chunk
assert whole.tool_calls[0]["args"] == call["args"]
for method in ("function_calling", "json_schema"):
    assert isinstance(
        demo.with_structured_output(GetWeather, method=method, strict=True).invoke("It was a"), GetWeather
    )

# An agent, by chats and by responses
arguments = {"city": "Bath", "day": 2}
text = "<tool_call>" + json.dumps({"name": "GetWeather", "arguments": arguments}) + "</tool_call><eos>"
for by_responses in (False, True):
    model = ChatOpenAI(model="demo", base_url=f"{sys.argv[2]}/v1", api_key="none", use_responses_api=by_responses)
    agent = model.bind_tools([GetWeather])
    messages = [HumanMessage(text)]
    answer = agent.invoke(messages)
    assert [call["args"] for call in answer.tool_calls] == [arguments]
    messages += [answer, ToolMessage("It rains.<eos>", tool_call_id=answer.tool_calls[0]["id"])]
    assert agent.invoke(messages).text == "It rains."
