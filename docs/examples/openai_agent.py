"""An agent with a tool, written for any endpoint that speaks OpenAI's language; nothing in `solve` knows of training.

    OPENAI_API_KEY=... python openai_agent.py '37*46'        asks a model and prints its answer

`agent` is what `rollout.program_options.function` names: it says where the model is, and that is all.
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import os
import sys
from typing import Any

from openai import AsyncOpenAI

MODEL = os.environ.get("AGENT_MODEL", "gpt-4o-mini")
MAX_TURNS = 4
OPERATIONS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute a sum, difference or product of whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "12*34"}},
                "required": ["expression"],
            },
        },
    }
]


def calculator(expression: str) -> int:
    """Whole numbers with +, - and *."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return int(OPERATIONS[type(op)](value(left), value(right)))
        raise ValueError("only whole numbers with +, - and *")

    return value(ast.parse(expression, mode="eval").body)


def use_tool(name: str, arguments: str) -> str:
    """The tool's answer to the model: the result, or what was wrong with the call."""
    if name != "calculator":
        return f"error: no tool {name}"
    try:
        return str(calculator(**json.loads(arguments)))
    except Exception as error:
        return f"error: {error}"


async def solve(client: AsyncOpenAI, question: str) -> str:
    """The answer, after as many tool calls as the model wants."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply)
        for call in reply.tool_calls:
            if call.type != "function":
                continue
            result = use_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


# One connection pool for all conversations of a process.
clients = AsyncOpenAI(api_key="given with each conversation")


async def agent(base_url: str, api_key: str, task: dict[str, Any]) -> None:
    """One conversation of a training run. It may return what it was worth; here the recipe's reward says that."""
    client = clients.with_options(base_url=base_url, api_key=api_key)
    await solve(client, task["messages"][-1]["content"])


if __name__ == "__main__":
    print(asyncio.run(solve(AsyncOpenAI(), sys.argv[1])))
