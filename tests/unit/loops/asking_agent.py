"""Ask the policy twice by HTTP and report a reward, with the standard library alone; the second episode gives up."""

import json
import os
import sys
import urllib.request

task = json.load(sys.stdin)


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


messages = task["messages"]
for _ in range(2):
    body = {"model": "any", "messages": messages}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "Again."}]
    if task["episode"] == 1 and task["purpose"] == "train":
        sys.exit("I give up")
post(os.environ["COATI_REWARD_URL"], {"reward": len(answer["content"]) % 2 + len(task["ground_truth"])})
