# /// script
# dependencies = ["text-generation==0.7.0"]
# ///
"""TGI's client: texts and chats, whole and streamed."""

import sys

from text_generation import Client

client = Client(sys.argv[1])
whole = client.generate("It was a", max_new_tokens=12)
assert len(whole.details.tokens) == 12
assert (
    "".join(piece.token.text for piece in client.generate_stream("It was a", max_new_tokens=12)) == whole.generated_text
)
chat = {"messages": [{"role": "user", "content": "It was a"}], "max_tokens": 12, "temperature": 0.0}
answer = client.chat(**chat).choices[0].message.content
assert answer
assert "".join(chunk.choices[0].delta.content or "" for chunk in client.chat(**chat, stream=True)) == answer
