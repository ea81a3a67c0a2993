"""The program `tools`: the policy calls tools and observes their results, until it answers without a call.

prompt (with the tools' schemas) ─▶ turn ─▶ calls? ──no──▶ the row
                                      ▲        │yes
                                      └─ results, loss mask 0
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from meshrl.common import plugins, tracing
from meshrl.common.config import read_options
from meshrl.common.user_functions import check_function
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Int32, Json, Task, Uid
from meshrl.images.messages import has_pictures, with_parts
from meshrl.rollout.agents.session import Gateway
from meshrl.rollout.conversation import Budget, ChatMessage, Conversation, prompt_of
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.tokenizer import ChatTokenizer, Tokenizer, look_at, picture_tokenizer
from meshrl.rollout.tools.ports import FORMATS, ToolCall, ToolCaller
from meshrl.rollout.tools.ports import ToolsConfig as Config
from meshrl.rollout.tools.search import check_folder
from meshrl.rollout.tools.toolbox import TaskTools, ToolBuilder, ToolOffer, named_tools

log = logging.getLogger(__name__)

CALLS_TOOLS = True
"""Results of tools are messages, unless the format of its calls says otherwise."""


def check(config: Config) -> None:
    """Check the options before anything starts; raises ConfigError."""
    load_format(config.format)
    for key, tool in named_tools(config):
        if tool.function:
            check_function(tool.function, f"{key}.function")
        if tool.search is not None and tool.search.folder is not None:
            check_folder(tool.search.folder, f"{key}.search")


def build(options: Mapping[str, object], *, gateway: Gateway | None = None) -> ToolProgram:
    """The program with the recipe's tools; raises ConfigError for wrong options."""
    return ToolProgram(read_options(Config, options, where="rollout.program_options"))


class ToolProgram(Program):
    """One conversation with tools a row."""

    def __init__(self, config: Config, own: Sequence[ToolOffer] = ()) -> None:
        """`own` are tools beside the recipe's.

        Raises:
            ConfigError: an unknown format, or a function that is no tool.
        """
        self._config = config
        self._parse = load_format(config.format)
        self._observation: str = plugins.constant(FORMATS, config.format, "OBSERVATION", "")
        self._stop = (*config.stop, *plugins.constant(FORMATS, config.format, "STOP", ()))
        self._builder = ToolBuilder(config, own)
        self._warned = False

    async def start(self) -> None:
        """Start or connect the MCP servers; raises ConfigError or InfraError if that fails."""
        await self._builder.toolbox()

    async def aclose(self) -> None:
        """End the MCP servers."""
        await self._builder.close()

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """One row."""
        if not isinstance(tokenizer, ChatTokenizer):
            raise ConfigError("tools need a tokenizer with a chat template")
        tools = (await self._builder.toolbox()).of(task)
        try:
            return await self._row(task, uid, engine, tokenizer, tools)
        finally:
            self._builder.release(uid)

    async def _row(
        self,
        task: Task,
        uid: Uid,
        engine: Generator,
        tokenizer: ChatTokenizer,
        tools: TaskTools,
    ) -> Rollout:
        config, caller = self._config, ToolCaller(task=task, uid=uid)
        budget = Budget.of(task, turn_tokens=config.max_turn_tokens, turns=config.max_turns)
        await look_at(tokenizer, task.media)
        prompt = self._prompt(task, tokenizer, tools)
        conversation = Conversation(uid, tokenizer, prompt, budget=budget, media=task.media)
        sampling = replace(task.sampling, stop=(*task.sampling.stop, *self._stop))
        while True:
            turn = await conversation.sample(engine, sampling)
            if turn.finish_reason != "stop":
                return conversation.rollout()
            calls = self._parse(tokenizer.decode_all(turn.tokens.tolist()))
            if not calls:
                return conversation.rollout()
            conversation.called([{"name": c.name, "arguments": dict(c.arguments)} for c in calls])
            if conversation.full:
                return conversation.rollout("max_turns" if conversation.left else "length")
            if not tools.stateful and conversation.replay(engine):
                continue  # an earlier worker of the row has called them
            results = await self._results(calls, tools, caller, tokenizer)
            if not await self._observe(conversation, results):
                return conversation.rollout("length")

    async def _observe(self, conversation: Conversation, results: Sequence[ChatMessage]) -> bool:
        """Append the results: messages, or text where the format has its own; False: they do not fit."""
        if not self._observation:
            await conversation.look_at(results)
            return conversation.observe(results)
        if has_pictures(results):
            raise UserError(
                f"a tool returned a picture, and the format {self._config.format} has text only"
            )
        said = (self._observation.replace("{}", str(each["content"])) for each in results)
        return conversation.observe_text("".join(said))

    def _prompt(self, task: Task, tokenizer: ChatTokenizer, tools: TaskTools) -> Int32:
        """Messages are rendered again, with the tools; text is not, nor a prompt that says itself how to call."""
        if not task.messages or self._observation:
            return task.prompt_ids
        messages = with_parts(task.messages) if task.media else list(map(asdict, task.messages))
        ids = prompt_of(tokenizer, messages, tools=tools.schemas())
        if task.media:
            ids = picture_tokenizer(tokenizer).with_places(ids, task.media)[0].tolist()
        if not self._warned and np.array_equal(ids, task.prompt_ids):
            log.warning("the chat template does not show the policy its tools")
            self._warned = True
        return np.array(ids, dtype=np.int32)

    async def _results(
        self,
        calls: Sequence[ToolCall],
        tools: TaskTools,
        caller: ToolCaller,
        tokenizer: ChatTokenizer,
    ) -> list[ChatMessage]:
        """A message for each call. Calls of stateful tools run in order, others at the same time."""
        most = self._config.max_calls
        over = ToolCall(name="", problem=f"more than {most} calls in one turn")
        limited = [call if index < most else over for index, call in enumerate(calls)]
        slots = asyncio.Semaphore(1 if tools.stateful else most)

        async def result(call: ToolCall) -> Json:
            async with slots:
                with tracing.span("tool", tool=call.name):
                    return await tools.call(call, caller, tokenizer)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(result(call)) for call in limited]
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from faults
        return [
            {"role": self._config.role, "name": call.name, "content": each.result()}
            for call, each in zip(calls, tasks, strict=True)
        ]


def load_format(name: str) -> Callable[[str], Sequence[ToolCall]]:
    """The parser of a format of calls; raises ConfigError, with the known formats, for an unknown one."""
    parse: Callable[[str], Sequence[ToolCall]] = plugins.load(FORMATS, name, "parse")
    return parse
