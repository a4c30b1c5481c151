# /// script
# dependencies = ["huggingface-hub==2.4.0"]
# ///
"""Hugging Face's InferenceClient: texts and chats, whole and streamed, by the server's URL and by OpenAI's."""

import sys

from huggingface_hub import InferenceClient

url = sys.argv[1]
client = InferenceClient(url, token="none")
whole = client.text_generation("It was a", max_new_tokens=12, details=True, return_full_text=False)
assert len(whole.details.tokens) == 12
assert "".join(client.text_generation("It was a", max_new_tokens=12, stream=True)) == whole.generated_text
asked = {"messages": [{"role": "user", "content": "It was a"}], "max_tokens": 12, "temperature": 0.0}
answers = set()
for one in (client, InferenceClient(base_url=f"{url}/v1", token="none")):
    answer = one.chat_completion(**asked).choices[0].message.content
    streamed = one.chat_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == answer
    answers.add(answer)
assert len(answers) == 1
assert answers != {""}
