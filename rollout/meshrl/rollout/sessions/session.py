"""One row whose conversation somebody else leads: asks in, a trajectory out.

    client ──SessionRequest──▶ Session ──place in the history──▶ GenerateRequest ──▶ engine
       ▲               │                                                    │
       └──── Pieces ◀──┴── AnswerStream (a task of its own) ◀──────── deltas ─────┘
                            at the end: a Turn in the history, an Answer

consumes: asks. waits for: the engine. unblocked by: its deltas, `close`, a client that leaves. produces: turns; or
a fault of the engine, which ends the row as such. A response that was not sampled to its end leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np

from meshrl.contract.errors import CapacityError, InfraError, MeshError, UserError
from meshrl.contract.rows import posted_column
from meshrl.contract.types import (
    POSTED_REWARD,
    GenerateRequest,
    Int32,
    Outcome,
    PostedReward,
    SamplingParams,
    Task,
    Uid,
)
from meshrl.rollout import chat
from meshrl.rollout.conversation import Budget, Conversation
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.sampling import Response
from meshrl.rollout.sessions.answer_stream import AnswerStream
from meshrl.rollout.sessions.history import History, Place, Said, Turn, Written
from meshrl.rollout.sessions.requests import (
    Answer,
    ContextLengthError,
    SessionEndedError,
    SessionRequest,
)
from meshrl.rollout.sessions.visible_text import VisibleText
from meshrl.rollout.tokenizer import ChatTokenizer

TOKEN_PREFIX: Final = "mrs_"
Ended: TypeAlias = Callable[[Turn, Answer], None]


class Branch(StrEnum):
    """Which branch of a conversation becomes the row."""

    LAST = "last"
    """The one with the last answer: what the agent ended with."""
    LONGEST = "longest"
    """The one with the most sampled tokens."""
    ONLY = "only"
    """There may be but one: a request that does not go on from the last answer is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """What holds for every session of a worker."""

    branch: Branch = Branch.LAST
    client_sampling: bool = False
    """A request's temperature and top_p count instead of the task's."""
    tools_unseen: bool = False
    """Tools need not be in the prompt."""
    concurrent: int = 16
    """Requests of one session that run at once; further ones are refused."""
    requests: int = 1024
    """Of one session in all."""
    prompt_tokens: int | None = None
    """The longest prompt of a conversation's first request; None: the engine's limit."""


class Session:
    """One row in the making. Belongs to one event loop."""

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
        """Whoever has it may ask; 256 random bits."""
        self.history = History()
        self.reward: PostedReward | None = None
        self.finished = asyncio.Event()
        """Whoever leads the conversation has said that it is over."""
        self.fault: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()
        """The first fault of the engine: what follows is no fault of the agent's."""
        self.asked = 0
        """Requests so far."""
        self.full = False
        """A request found no room for an answer, or came after the last that the session may have."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._rules = rules or SessionRules()
        self._asking: list[AnswerStream] = []
        self._ended = ""

    @property
    def ended(self) -> str:
        """Why no more requests are taken; empty while they are."""
        return self._ended

    @property
    def _running(self) -> list[AnswerStream]:
        return [asking for asking in self._asking if not asking.task.done()]

    def ask(self, ask: SessionRequest) -> AnswerStream:
        """Begin to answer.

        Raises:
            UserError: the request means nothing, or the chat template refuses it.
            ContextLengthError: there is no room left for a token of an answer.
            CapacityError: too many requests at once.
            SessionEndedError: the session is over.
        """
        self._admit()
        if ask.prompt is None:
            return self._ask_chat(ask)
        return self._ask_text(ask, ask.prompt)

    def post(self, reward: PostedReward) -> None:
        """Say what the conversation was worth; of several the last counts. Raises SessionEndedError."""
        if self._ended and reward != self.reward:
            raise SessionEndedError(f"the session has ended: {self._ended}")
        self.reward = reward

    async def close(self, why: str) -> None:
        """Take no more requests and end those that run; idempotent."""
        self._ended = self._ended or why
        running = self._running
        for asking in running:
            asking.end(SessionEndedError(f"the session has ended: {self._ended}"))
        await asyncio.gather(*(asking.task for asking in running), return_exceptions=True)

    def rollout(self, *, outcome: Outcome | None = None) -> Rollout:
        """The row: the branch that the rules choose. An `outcome` given stands instead of its last answer's.

        Raises:
            InfraError: nothing was sampled.
        """
        chosen = self._chosen()
        if chosen is None:
            raise InfraError("the session gave no answer, so there is nothing to learn from")
        rollout = self._conversation(chosen).rollout(outcome=outcome)
        return replace(rollout, columns={POSTED_REWARD: posted_column(self.reward)})

    @property
    def left_out(self) -> int:
        """Sampled tokens that are not on the branch that becomes the row."""
        every = sum(len(turn.response.tokens) for turn in self.history.turns)
        chosen = self._chosen()
        return every - (chosen.sampled if chosen else 0)

    def _chosen(self) -> Turn | None:
        """The last turn of the branch that becomes the row."""
        turns = self.history.turns
        if self._rules.branch is Branch.LONGEST:
            return max(reversed(turns), key=lambda turn: turn.sampled, default=None)
        return turns[-1] if turns else None

    def _admit(self) -> None:
        if self._ended:
            raise SessionEndedError(f"the session has ended: {self._ended}")
        if (running := len(self._running)) >= self._rules.concurrent:
            raise CapacityError(
                f"{running} requests of this session run at once already", retry_after_s=1
            )
        if self.asked >= self._rules.requests:
            self.full = True
            raise SessionEndedError(f"the session has had its {self._rules.requests} requests")

    def _ask_chat(self, ask: SessionRequest) -> AnswerStream:
        place = self.history.find_chat(ask.messages, ask.tools)
        if place.turn is None:
            observed = chat.prompt_of(self._tokenizer, ask.messages, tools=ask.tools)
            self._check_told(ask, observed)
        else:
            observed = self._conversation(place.turn).rendered(ask.messages[place.fresh :])
        visible = VisibleText(self._tokenizer, stop=ask.stop, tools=bool(ask.tools))

        def ended(turn: Turn, answer: Answer) -> None:
            said = Said(text=answer.text, tool_calls=answer.tool_calls)
            self.history.chatted(place, turn, said)

        return self._begin(ask, place, observed, visible, ended)

    def _check_told(self, ask: SessionRequest, prompt: Sequence[int]) -> None:
        """Raises UserError where the policy would not hear of its tools."""
        if not ask.tools or self._rules.tools_unseen:
            return
        if prompt == chat.prompt_of(self._tokenizer, ask.messages):
            raise UserError(
                "tools: the chat template of this model does not tell it of tools "
                "(rollout.program_options.tools_unseen takes them all the same)"
            )

    def _ask_text(self, ask: SessionRequest, prompt: str | Sequence[int]) -> AnswerStream:
        if isinstance(prompt, str):
            place, rest = self.history.find_text(prompt)
            observed = self._tokenizer.encode(rest)
        else:
            place = self.history.find_tokens(prompt)
            observed = list(prompt[place.fresh :])
        visible = VisibleText(self._tokenizer, stop=ask.stop, tools=False)

        def ended(turn: Turn, answer: Answer) -> None:
            text = prompt + answer.text if isinstance(prompt, str) else ""
            tokens = tuple(self._conversation(turn).tokens.tolist())
            self.history.wrote(Written(text=text, hidden=visible.hidden, tokens=tokens, turn=turn))

        return self._begin(ask, place, observed, visible, ended)

    def _begin(
        self,
        ask: SessionRequest,
        place: Place,
        observed: Sequence[int],
        visible: VisibleText,
        ended: Ended,
    ) -> AnswerStream:
        """Start the request that answers at `place`, after the tokens `observed`."""
        last = next(reversed(self.history.turns), None)
        if self._rules.branch is Branch.ONLY and (place.turn is not last or self._running):
            raise UserError(
                "this request does not go on from the last answer, and the run trains one branch only "
                "(rollout.program_options.branch)"
            )
        request = self._request(ask, self._before(place, observed))
        self.asked += 1

        def whole(response: Response, answer: Answer) -> None:
            ended(Turn(parent=place.turn, observed=tuple(observed), response=response), answer)

        asking = AnswerStream(self._engine, request, visible, ended=whole, fault=self._broke)
        self._asking = [*self._running, asking]
        return asking

    def _broke(self, error: MeshError) -> None:
        if not self.fault.done():
            self.fault.set_result(error)

    def _before(self, place: Place, observed: Sequence[int]) -> Conversation:
        """The conversation up to where the answer begins. Raises ContextLengthError."""
        most = self._rules.prompt_tokens
        if place.turn is None:
            if not observed:
                raise UserError("the prompt is empty")
            if most is not None and len(observed) > most:
                self.full = True
                raise ContextLengthError(
                    f"the prompt has {len(observed)} tokens, and may have {most} (data.max_prompt_length)"
                )
            return self._beginning(observed)
        conversation = self._conversation(place.turn)
        if not conversation.observe_tokens(observed):
            self.full = True
            raise ContextLengthError(
                f"the conversation has {len(conversation.tokens)} tokens and this request adds {len(observed)}: "
                f"no room for an answer in {self.task.sampling.max_tokens} (data.max_response_length)"
            )
        return conversation

    def _request(self, ask: SessionRequest, conversation: Conversation) -> GenerateRequest:
        sampling = conversation.request(self._sampling(ask)).sampling
        # The first request is known by the uid itself, which is what a journal keeps; draws of others are their own.
        name = f"{self.uid}/{self.asked}" if self.asked else str(self.uid)
        return GenerateRequest(request_id=name, prompt_ids=conversation.tokens, sampling=sampling)

    def _sampling(self, ask: SessionRequest) -> SamplingParams:
        """The task's: what is trained is what was sampled. Lengths and stops change no distribution."""
        task = self.task.sampling
        most = task.max_tokens if ask.max_tokens is None else min(ask.max_tokens, task.max_tokens)
        stop = (*task.stop, *(stop for stop in ask.stop if stop not in task.stop))
        sampling = replace(task, max_tokens=most, stop=stop)
        if not self._rules.client_sampling:
            return sampling
        return replace(
            sampling,
            temperature=task.temperature if ask.temperature is None else ask.temperature,
            top_p=task.top_p if ask.top_p is None else ask.top_p,
        )

    def _beginning(self, prompt: Sequence[int]) -> Conversation:
        ids: Int32 = np.array(prompt, dtype=np.int32)
        return Conversation(self.uid, self._tokenizer, ids, budget=Budget.of(self.task))

    def _conversation(self, turn: Turn) -> Conversation:
        """Everything up to the end of `turn`, joined as it was sampled."""
        first, *later = turn.path()
        conversation = self._beginning(first.observed)
        conversation.append(first.response)
        for each in later:
            conversation.observe_tokens(each.observed)
            conversation.append(each.response)
        return conversation
