"""An agent as a command: two answers, then what they were worth."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

from openai import OpenAI


def main() -> None:
    task = json.load(sys.stdin)
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": task["prompt"]}]
    for number in range(2):
        said = client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=6)  # type: ignore[arg-type]
        messages.append({"role": "assistant", "content": said.choices[0].message.content or ""})
        messages.append({"role": "user", "content": f"more {number}"})
    body = json.dumps({"score": float(task["ground_truth"]), "components": {"answers": 2}}).encode()
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/reward",
        data=body,
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    urllib.request.urlopen(request).read()
    assert not [name for name in os.environ if name.startswith("MESHRL_")]


if __name__ == "__main__":
    main()
