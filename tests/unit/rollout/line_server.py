"""An agent server that does what each task says: answers, fails, hangs, ends, or writes what is no answer."""

from __future__ import annotations

import json
import os
import sys
import time


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    if "late" in sys.argv:
        time.sleep(1000)
    if "broken" in sys.argv:
        sys.exit("no such taskset")
    say({"ready": True})
    for line in sys.stdin:
        message = json.loads(line)
        if "cancel" in message:
            say({"id": message["cancel"], "error": "cancelled"})
            continue
        number, what = message["id"], message["task"]["do"]
        if what == "die":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        elif what == "block":
            time.sleep(1000)
        elif what == "fail":
            say({"id": number, "error": "the maze fell over"})
        elif what == "long":
            say({"id": number, "reward": {"score": 1.0, "why": "x" * (2 << 20)}})
        elif what == "words":
            print("thinking …", flush=True)
            say([1])
            say({"id": number + 1000, "reward": 9})
            say({"id": number, "reward": "much"})
        elif what != "hang":
            say({"id": number, "reward": what and {"score": what, "pid": os.getpid()}})


if __name__ == "__main__":
    main()
