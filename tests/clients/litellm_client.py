# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""litellm, as a client of OpenAI's API and of Hugging Face's: chats, whole and streamed, texts, and tools."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the Internet for prices
import litellm

url = sys.argv[1]
asked = {"messages": [{"role": "user", "content": "It was a"}], "max_tokens": 12, "temperature": 0.0}
answers = set()
for model, base in (("openai/demo", f"{url}/v1"), ("huggingface/demo", url), ("huggingface/tgi", url)):
    there = {"model": model, "api_base": base, "api_key": "none"}
    whole = litellm.completion(**there, **asked).choices[0].message.content
    streamed = litellm.completion(**there, **asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole, model
    answers.add(whole)
assert len(answers) == 1
text = litellm.text_completion(
    model="openai/demo", api_base=f"{url}/v1", api_key="none", prompt="It was a", max_tokens=4
)
assert text.choices[0].text
schema = {"type": "object", "properties": {"city": {"enum": ["Bath", "London"]}}}
tool = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
answer = litellm.completion(
    model="openai/demo",
    api_base=f"{url}/v1",
    api_key="none",
    messages=asked["messages"],
    tools=[tool],
    tool_choice="required",
    parallel_tool_calls=False,
)
(call,) = answer.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["city"] in ("Bath", "London")
