# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""instructor in its TOOLS mode, whole and streamed, and with a schema as `response_format`."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

url = f"{sys.argv[1]}/v1"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bath", "London"]
    day: Literal[1, 2, 3]


asked = {"model": "demo", "messages": [{"role": "user", "content": "It was a"}], "response_model": Weather}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
    assert isinstance(client.chat.completions.create(**asked, max_retries=0), Weather), mode
client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.TOOLS)
*_, last = client.chat.completions.create_partial(**asked, max_retries=0)
assert last.city in ("Bath", "London"), last
