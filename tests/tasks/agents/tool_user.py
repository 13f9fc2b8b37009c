"""An agent in the words of the package `openai`, which knows of nothing else."""

import json
import sys

from openai import OpenAI

TOOL = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}


def main() -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": json.load(sys.stdin)}]
    while True:
        reply = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=messages,
            tools=[{"type": "function", "function": TOOL}],
            temperature=0.2,
            max_tokens=100,
        )
        [choice] = reply.choices
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls:
            added = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(added)})
    stream = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "So?"}], stream=True
    )
    print("".join(chunk.choices[0].delta.content or "" for chunk in stream))


main()
