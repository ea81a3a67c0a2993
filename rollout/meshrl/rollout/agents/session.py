"""One row whose conversation an agent leads: requests in, a trajectory out.

    client ──SessionRequest──▶ Session ──place in the history──▶ GenerateRequest ──▶ engine
       ▲                          │                                                    │
       └────── AnswerParts ◀──────┴── AnswerStream (its own task) ◀───── deltas ───────┘
                                        at the end: a Turn in the history, an Answer

consumes: requests. waits for: the engine. unblocked by: its deltas, `close`, a client that disconnects. produces:
turns; or a fault of the engine, with which the row fails. A response that was not sampled to its end is not recorded.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Final, Protocol, TypeAlias

import numpy as np

from meshrl.common.chat_templates import ENDS_OF_THOUGHT, drops_thoughts
from meshrl.contract.errors import CapacityError, InfraError, MeshError, UserError
from meshrl.contract.rows import parts_column, posted_column
from meshrl.contract.types import (
    PARTS,
    POSTED_REWARD,
    GenerateRequest,
    Int32,
    Json,
    Media,
    Outcome,
    PostedReward,
    SamplingParams,
    Task,
    Uid,
)
from meshrl.images.messages import has_pictures, marked, taken_out
from meshrl.rollout.agents.answer_stream import AnswerStream, VisibleText
from meshrl.rollout.agents.history import (
    Completion,
    RecordedTurn,
    ShownMessage,
    TreePlace,
    TurnTree,
    joined,
)
from meshrl.rollout.agents.requests import (
    ContextLengthError,
    SessionAnswer,
    SessionEndedError,
    SessionRequest,
)
from meshrl.rollout.conversation import Budget, ChatMessage, Conversation, prompt_of
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.streams import Response
from meshrl.rollout.tokenizer import ChatTokenizer, look_at, picture_tokenizer, reads_pictures

TOKEN_PREFIX: Final = "mrs_"
Ended: TypeAlias = Callable[[RecordedTurn, SessionAnswer], None]


class Branch(StrEnum):
    """Which branch of a conversation becomes the row."""

    LAST = "last"
    """The one with the last answer."""
    LONGEST = "longest"
    """The one with the most sampled tokens."""
    ONLY = "only"
    """There may be only one: a request that does not continue the last answer is refused."""
    EACH = "each"
    """All branches, one behind the other, each trained by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """Settings of every session of a worker."""

    branch: Branch = Branch.LAST
    client_sampling: bool = False
    """Use the parameters of the distribution that requests have instead of the task's."""
    tools_unseen: bool = False
    """Accept tools that the prompt does not show."""
    concurrent: int = 16
    """Requests of one session that may run at once; further ones are refused."""
    requests: int = 1024
    """Requests of one session in total."""
    prompt_tokens: int | None = None
    """The longest prompt of a conversation's first request; None: the engine's limit."""
    conversations: bool = False
    """Requests name their conversation, of several; one of them becomes the row (`AgentSession.conversation`)."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Addition of a request to its conversation."""

    tokens: Sequence[int]
    """Token ids, with one placeholder for each picture."""
    media: tuple[Media, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    """For people who read the row; none of a completion of text."""


def _said(answer: SessionAnswer) -> ChatMessage:
    calls: list[Json] = [
        {"name": call.name, "arguments": call.arguments} for call in answer.tool_calls
    ]
    message: dict[str, Json] = {"role": "assistant", "content": answer.text}
    return {**message, "tool_calls": calls} if calls else message


class AgentSession:
    """One row while it is sampled. Used on one event loop."""

    def __init__(
        self,
        task: Task,
        uid: Uid,
        engine: Generator,
        tokenizer: ChatTokenizer,
        rules: SessionRules | None = None,
    ) -> None:
        self.task = task
        self.uid = uid
        self.id = secrets.token_hex(12)
        self.token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        """Authorises requests; 256 random bits."""
        self.history = TurnTree()
        self.reward: PostedReward | None = None
        self.conversation: str | None = None
        """The name of the conversation that becomes the row; None: any."""
        self.finished = asyncio.Event()
        """The agent has declared the conversation finished."""
        self.fault: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()
        """The first fault of the engine; later failures are not attributed to the agent."""
        self.asked = 0
        """Requests so far."""
        self._full: dict[str, str] = {}
        """Conversations that had a request which left no tokens for an answer, or one too many; why."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._rules = rules or SessionRules()
        self._dropping: frozenset[str] | None = None
        """The roles before which the chat template leaves thoughts out; None: not tried yet."""
        self._streams: list[AnswerStream] = []
        self._ended = ""

    @property
    def ended(self) -> str:
        """Why no more requests are accepted; empty while they are."""
        return self._ended

    @property
    def client_sampling(self) -> bool:
        """Whether requests choose the distribution."""
        return self._rules.client_sampling

    @property
    def full(self) -> str:
        """Why the row's conversation had to end: no token or no request was left; empty: it had not to."""
        if self.conversation is not None:
            return self._full.get(self.conversation, "")
        return next(iter(self._full.values()), "")

    @property
    def _running(self) -> list[AnswerStream]:
        return [stream for stream in self._streams if not stream.task.done()]

    async def look_at(self, request: SessionRequest) -> None:
        """Have the pictures of a request read beside the event loop, before `ask`. Raises as that does."""
        self._admit(request)
        if request.prompt is None and has_pictures(request.messages):
            known = self._find_chat(request).known
            await look_at(self._tokenizer, taken_out(request.messages[known:])[1])

    def ask(self, request: SessionRequest) -> AnswerStream:
        """Start an answer.

        Raises:
            UserError: the request is invalid, or the chat template refuses it.
            ContextLengthError: no token is left for an answer.
            CapacityError: too many requests at once.
            SessionEndedError: the session is over.
        """
        self._admit(request)
        if request.prompt is None:
            return self._ask_chat(request)
        return self._ask_text(request, request.prompt)

    def count_tokens(self, request: SessionRequest) -> int:
        """Tokens before the answer to a chat request, which is not asked. Raises UserError."""
        place, observed = self._observed(request)
        if place.turn is None:
            return len(self._beginning(observed.tokens, observed.media).tokens)
        return len(self._conversation(place.turn).tokens) + len(observed.tokens)

    def post(self, reward: PostedReward) -> None:
        """Set the reward of the conversation; the last call counts. Raises SessionEndedError."""
        if self._ended and reward != self.reward:
            raise SessionEndedError(f"the session has ended: {self._ended}")
        self.reward = reward

    async def close(self, reason: str) -> None:
        """Accept no more requests and abort those that run; idempotent."""
        self._ended = self._ended or reason
        running = self._running
        for stream in running:
            stream.end(SessionEndedError(f"the session has ended: {self._ended}"))
        await asyncio.gather(*(stream.task for stream in running), return_exceptions=True)

    def rollout(self, *, outcome: Outcome | None = None) -> Rollout:
        """The row: the branch that the rules choose. `outcome` replaces that of its last answer.

        Raises:
            InfraError: nothing was sampled, or there are several conversations and none of them was named.
        """
        names = {turn.conversation for turn in self._turns}
        if len(names) > 1:
            raise InfraError(
                f"the agent ended and did not say which of {len(names)} conversations is the row"
            )
        chosen = self._chosen()
        if chosen is None:
            why = f": {self.full}" if self.full else ""
            raise InfraError(f"the session gave no answer, so there is nothing to train on{why}")
        rollout = self._conversation(chosen).rollout(outcome=outcome)
        path = chosen.path()
        # What the first request said is the prompt.
        said = (path[0].messages[-1:], *(turn.messages for turn in path[1:]))
        messages = tuple(chain(*said)) if len(path) > 1 else ()
        columns = {POSTED_REWARD: posted_column(self.reward)}
        if self._rules.branch is Branch.EACH:
            turns = self._turns
            row, parts = joined(turns, lambda leaf: self._conversation(leaf).rollout().trajectory)
            columns = {**columns, PARTS: parts_column(parts)}
            messages = tuple(chain(*(turn.messages[-2:] for turn in turns)))
            rollout = replace(rollout, trajectory=row)
        return replace(rollout, columns=columns, messages=messages)

    @property
    def left_out(self) -> int:
        """Sampled tokens that are not in the row."""
        every = sum(len(turn.response.tokens) for turn in self.history.turns)
        if self._rules.branch is Branch.EACH:
            return every - sum(len(turn.response.tokens) for turn in self._turns)
        chosen = self._chosen()
        return every - (chosen.sampled if chosen else 0)

    def _chosen(self) -> RecordedTurn | None:
        """The last turn of the branch that becomes the row."""
        turns = self._turns
        if self._rules.branch is Branch.LONGEST:
            return max(reversed(turns), key=lambda turn: turn.sampled, default=None)
        return turns[-1] if turns else None

    @property
    def _turns(self) -> list[RecordedTurn]:
        """Turns of the conversation that becomes the row, in the order in which they ended."""
        name = self.conversation
        return [turn for turn in self.history.turns if name is None or turn.conversation == name]

    def _name(self, request: SessionRequest) -> str:
        return request.conversation if self._rules.conversations else ""

    def _find_chat(self, request: SessionRequest) -> TreePlace:
        """The conversation that a request continues.

        Where each branch is trained, a request for which the chat template leaves earlier thoughts out begins another
        one, behind what the model is shown wherever it is served.
        """
        place = self.history.find_chat(
            request.messages, request.tools, conversation=self._name(request)
        )
        if place.turn is None or self._rules.branch is not Branch.EACH:
            return place
        text = self._tokenizer.decode_all(self._conversation(place.turn).tokens.tolist())
        if not any(end in text for end in ENDS_OF_THOUGHT):
            return place
        if self._dropping is None:
            render = partial(self._tokenizer.render, generation=False)
            self._dropping = drops_thoughts(render)
        roles = {str(message.get("role")) for message in request.messages[place.known :]}
        return replace(place, turn=None, known=0) if roles & self._dropping else place

    def _admit(self, request: SessionRequest) -> None:
        if self._ended:
            raise SessionEndedError(f"the session has ended: {self._ended}")
        if (running := len(self._running)) >= self._rules.concurrent:
            raise CapacityError(
                f"{running} requests of this session run at once already", retry_after_s=1
            )
        if self.asked >= self._rules.requests:
            why = f"the session has had its {self._rules.requests} requests"
            self._full[self._name(request)] = why
            raise SessionEndedError(why)
        if request.sampling.get("logit_bias") and not self.client_sampling:
            why = "the policy is sampled as it is trained, without client_sampling"
            raise UserError(f"logit_bias must be empty: {why}", param="logit_bias")

    def _observed(self, request: SessionRequest) -> tuple[TreePlace, Observed]:
        """The conversation that a chat request continues, and its new messages. Raises UserError."""
        place = self._find_chat(request)
        messages, media = taken_out(request.messages[place.known :])
        if media and self._rules.branch is Branch.EACH:
            raise UserError("pictures: rollout.program_options.branch: each trains text only")
        if place.turn is None:
            observed = prompt_of(self._tokenizer, messages, tools=request.tools)
            self._check_tools_shown(messages, request.tools, observed)
        else:
            observed = self._conversation(place.turn).rendered(messages)
        return place, Observed(observed, media, tuple(map(marked, messages)))

    def _ask_chat(self, request: SessionRequest) -> AnswerStream:
        place, observed = self._observed(request)
        visible = VisibleText(self._tokenizer, stop=request.stop, tools=bool(request.tools))

        def ended(turn: RecordedTurn, answer: SessionAnswer) -> None:
            message = ShownMessage(text=answer.text, tool_calls=answer.tool_calls)
            self.history.add_chat(place, turn, message)

        return self._begin(request, place, observed, visible, ended)

    def _check_tools_shown(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json], prompt: Sequence[int]
    ) -> None:
        """Raises UserError if the prompt does not show the policy its tools."""
        if not tools or self._rules.tools_unseen:
            return
        if prompt == prompt_of(self._tokenizer, messages):
            raise UserError(
                "tools: the chat template of this model does not show it tools "
                "(rollout.program_options.tools_unseen accepts them nevertheless)"
            )

    def _ask_text(self, request: SessionRequest, prompt: str | Sequence[int]) -> AnswerStream:
        if isinstance(prompt, str):
            place, rest = self.history.find_text(prompt, conversation=self._name(request))
            observed = self._tokenizer.encode(rest)
        else:
            place = self.history.find_tokens(prompt, conversation=self._name(request))
            observed = list(prompt[place.known :])
        visible = VisibleText(self._tokenizer, stop=request.stop, tools=False)

        def ended(turn: RecordedTurn, answer: SessionAnswer) -> None:
            text = prompt + answer.text if isinstance(prompt, str) else ""
            tokens = tuple(self._conversation(turn).tokens.tolist())
            self.history.add_completion(
                Completion(text=text, hidden=visible.hidden, tokens=tokens, turn=turn)
            )

        return self._begin(request, place, Observed(observed), visible, ended)

    def _begin(
        self,
        asked: SessionRequest,
        place: TreePlace,
        observed: Observed,
        visible: VisibleText,
        ended: Ended,
    ) -> AnswerStream:
        """Start the answer that continues `place` after the tokens `observed`."""
        name = self._name(asked)
        own = [turn for turn in self.history.turns if turn.conversation == name]
        last = own[-1] if own else None
        running = any(stream.conversation == name for stream in self._running)
        if self._rules.branch is Branch.ONLY and (place.turn is not last or running):
            raise UserError(
                "this request does not continue the last answer, and the run trains one branch only "
                "(rollout.program_options.branch)"
            )
        request = self._request(asked, self._before(place, observed, name))
        self.asked += 1

        def complete(response: Response, answer: SessionAnswer) -> None:
            said = (*observed.messages, _said(answer)) if asked.messages else ()
            turn = RecordedTurn(
                parent=place.turn,
                observed=tuple(observed.tokens),
                response=response,
                media=observed.media,
                messages=said,
                conversation=name,
            )
            ended(turn, answer)

        stream = AnswerStream(
            self._engine,
            request,
            visible,
            ended=complete,
            fault=self._failed,
            conversation=name,
        )
        self._streams = [*self._running, stream]
        return stream

    def _failed(self, error: MeshError) -> None:
        if not self.fault.done():
            self.fault.set_result(error)

    def _before(self, place: TreePlace, observed: Observed, name: str) -> Conversation:
        """The conversation up to the start of the answer. Raises ContextLengthError."""

        def too_long(why: str) -> ContextLengthError:
            self._full[name] = why
            return ContextLengthError(why)

        most = self._rules.prompt_tokens
        if place.turn is None:
            if not observed.tokens:
                raise UserError("the prompt is empty")
            conversation = self._beginning(observed.tokens, observed.media)
            if most is not None and (length := len(conversation.tokens)) > most:
                raise too_long(
                    f"the prompt has {length} tokens, and may have {most} (data.max_prompt_length)"
                )
            return conversation
        conversation = self._conversation(place.turn)
        if not conversation.observe_tokens(observed.tokens, observed.media):
            added = len(observed.tokens)
            raise too_long(
                f"the conversation has {len(conversation.tokens)} tokens and this request adds {added}: "
                f"no room for an answer in {self.task.sampling.max_tokens} (data.max_response_length)"
            )
        return conversation

    def _request(self, asked: SessionRequest, conversation: Conversation) -> GenerateRequest:
        # The id of the first request is the uid, of which checkpoints are kept; others have draws of their own.
        name = f"{self.uid}/{self.asked}" if self.asked else str(self.uid)
        request = conversation.request(self._sampling(asked))
        if asked.prompt_top is not None and request.media:
            raise UserError("prompt_logprobs: not supported for a prompt with images")
        return replace(request, request_id=name, prompt_top=asked.prompt_top)

    def _sampling(self, asked: SessionRequest) -> SamplingParams:
        """The task's, so that training and sampling agree. Lengths and stops do not change the distribution."""
        task = self.task.sampling
        most = (
            task.max_tokens if asked.max_tokens is None else min(asked.max_tokens, task.max_tokens)
        )
        stop = (*task.stop, *(stop for stop in asked.stop if stop not in task.stop))
        sampling = replace(task, max_tokens=most, stop=stop)
        return replace(sampling, **asked.sampling) if self.client_sampling else sampling

    def _beginning(self, prompt: Sequence[int], media: tuple[Media, ...]) -> Conversation:
        ids: Int32 = np.array(prompt, dtype=np.int32)
        if media or reads_pictures(self._tokenizer):
            ids, _ = picture_tokenizer(self._tokenizer).with_places(prompt, media)
        budget = Budget.of(self.task)
        return Conversation(self.uid, self._tokenizer, ids, budget=budget, media=media)

    def _conversation(self, turn: RecordedTurn) -> Conversation:
        """All turns up to the end of `turn`, joined as they were sampled."""
        first, *later = turn.path()
        conversation = self._beginning(first.observed, first.media)
        conversation.append(first.response)
        for each in later:
            conversation.observe_tokens(each.observed, each.media)
            conversation.append(each.response)
        return conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a session, for a client of the `openai` package; Anthropic's adds /v1 itself."""

    base_url: str
    api_key: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables in which clients of OpenAI and of Anthropic look for it."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }


class Gateway(Protocol):
    """Implemented by `meshrl.http.gateway`."""

    @property
    def prompt_tokens(self) -> int | None:
        """The longest prompt that a row of the run may have; None: any that fits the engine."""
        ...

    def opened(self, session: AgentSession) -> AbstractContextManager[Address]:
        """Accept requests for `session` during the context."""
        ...

    def bound(
        self, address: Address, listener: socket.socket
    ) -> AbstractAsyncContextManager[Address]:
        """Let clients of `listener` sample for the session at `address`, and do nothing else.

        Yields the address for them, whose key is no secret.
        """
        ...

    def hand_over(self, session: AgentSession, address: Address) -> bool:
        """Give an open session to the external agent that has waited longest; False when none waits."""
        ...

    @property
    def demand(self) -> int:
        """How many external agents wait for a session."""
        ...
