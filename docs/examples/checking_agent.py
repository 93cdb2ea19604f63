"""Ask for an answer, then for another look at it, and reward the last one: an agent with the openai package alone."""

import json
import sys

from openai import OpenAI

task = json.load(sys.stdin)  # uid, messages, columns, ...; ground_truth with --agent-ground-truth
client = OpenAI()  # its URL and key are in the environment: OPENAI_BASE_URL, OPENAI_API_KEY
messages = task["messages"]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "Check it, and answer again."}]
is_right = (answer.content or "").strip().endswith(task["ground_truth"])
client.post("/reward", body={"reward": float(is_right)}, cast_to=object)
