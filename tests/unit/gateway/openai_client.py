"""Play episodes with the unchanged openai client: `openai_client.py AT_A_TIME < episodes.json`.

An episode is {"url", "key", "mode"}; its mode is chat, tools or stream.
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def answer(api: AsyncOpenAI, mode: str, messages: list, seed: int) -> dict:
    if mode == "stream":
        content = ""
        stream = await api.chat.completions.create(model="any", messages=messages, seed=seed, stream=True)
        async for chunk in stream:
            content += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return {"role": "assistant", "content": content}
    more = {"tools": [TOOL]} if mode == "tools" else {}
    reply = await api.chat.completions.create(model="any", messages=messages, seed=seed, **more)
    return reply.choices[0].message.model_dump(exclude_none=True)


async def play(number: int, episode: dict, places: asyncio.Semaphore) -> None:
    async with places, AsyncOpenAI(base_url=episode["url"], api_key=episode["key"], timeout=120) as api:
        messages = [{"role": "user", "content": f"What is {number} plus {number % 7}?"}]
        for turn in range(3):
            message = await answer(api, episode["mode"], messages, 1000 * number + turn)
            messages.append(message)
            for call in message.get("tool_calls", ()):
                given = json.loads(call["function"]["arguments"])
                result = str(given["a"] + given["b"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": f"Check step {turn + 1} again."})


async def main(at_a_time: int) -> None:
    places = asyncio.Semaphore(at_a_time)
    episodes = json.load(sys.stdin)
    await asyncio.gather(*(play(number, episode, places) for number, episode in enumerate(episodes)))


asyncio.run(main(int(sys.argv[1])))
