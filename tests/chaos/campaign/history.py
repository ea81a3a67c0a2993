"""Checks each row's life and the ledger by what the actors wrote down, and nothing else.

A call whose end nobody wrote down may or may not have happened; every rule holds either way. What is looked for:

    grants       one fencing token of a row and stage goes to one lease
    fencing      an acknowledged write has the newest token that was ever granted for its row and stage
    content      what is fetched is what was acknowledged, or else what somebody tried to write
    batches      taking again is taking the same; whole groups of one attempt; no row older than allowed
    replays      a trainer that went back is given the same groups in the same order, but those that it died with
    exits        a row that was committed or filtered is handed to nobody afterwards
    lineage      the model learned what was taken, every admitted task exactly once
    ledger       the books say what happened, at every look and at the end
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

from meshrl.contract.types import Uid

from .events import Call, lines, read
from .plan import BATCH, GROUP, MAX_STALENESS, Plan

Key: TypeAlias = tuple[str, str]
"""Uid and stage."""


@dataclass
class Verdict:
    """The checker's result. `lost` and `duplicated` count rows (index of a task), whatever their attempt."""

    lost: int
    duplicated: int
    admitted: int
    trained: int
    violations: dict[str, list[str]] = field(default_factory=dict)

    @property
    def legal(self) -> bool:
        return not any(self.violations.values())


class History:
    """Everything that was seen of one campaign, once all of it is over."""

    def __init__(self, plan: Plan) -> None:
        self.calls = read(plan.events)
        self.final: dict[str, Any] = json.loads(plan.final.read_text())
        self.steps = [(line["step"], line["rows"]) for line in lines(plan.lineage)]
        self.trained = [uid for _, rows in self.steps for uid in rows]
        self.filtered = self._filtered()

    def check(self) -> Verdict:
        """All rules, each with the violations that it found."""
        rules = (
            self.grants,
            self.fencing,
            self.content,
            self.batches,
            self.replays,
            self.exits,
            self.lineage,
            self.ledger,
        )
        lives = Counter(_row(uid) for uid in [*self.trained, *self.filtered])
        admitted = {
            f"{task}/{index}"
            for task in map(_task, range(int(self.final["cursor"] or 0)))
            for index in range(GROUP)
        }
        return Verdict(
            lost=len(admitted - set(lives)),
            duplicated=sum(count - 1 for count in lives.values()),
            admitted=len(admitted),
            trained=len(self.trained),
            violations={rule.__name__: list(rule()) for rule in rules},
        )

    def _of(self, *verbs: str) -> Iterator[Call]:
        return (call for call in self.calls if call.verb in verbs)

    def _answered(self, *verbs: str) -> Iterator[tuple[Call, dict[str, Any]]]:
        return ((c, c.answer) for c in self._of(*verbs) if c.answer is not None)

    def _filtered(self) -> set[str]:
        """Acknowledged, or asked for and never trained afterwards: then the answer got lost, not the row."""
        trained = set(self.trained)
        return {
            uid
            for call in self._of("filter")
            for uid in call.asked["uids"]
            if call.answer is not None or uid not in trained
        }

    def grants(self) -> Iterator[str]:
        """One fencing token of a row and stage goes to one lease."""
        seen: dict[tuple[str, str, int], str] = {}
        for call, answer in self._answered("lease"):
            for uid, token in answer["rows"]:
                key = (uid, call.asked["stage"], token)
                if key in seen:
                    yield f"{uid}: {key[1]} token {token} went to {seen[key]} and {call.who}"
                seen[key] = call.who

    def fencing(self) -> Iterator[str]:
        """An acknowledged write has the newest token ever granted: later grants are the proof of a lost write."""
        newest: defaultdict[Key, int] = defaultdict(int)
        for call, answer in self._answered("lease"):
            for uid, token in answer["rows"]:
                key = (uid, call.asked["stage"])
                newest[key] = max(newest[key], token)
        for (uid, stage), (token, _) in self._acknowledged().items():
            if token != newest[uid, stage]:
                yield (
                    f"{uid}: {stage} written under token {token} was acknowledged, and token"
                    f" {newest[uid, stage]} was granted"
                )

    def _acknowledged(self) -> dict[Key, tuple[int, str]]:
        """Token and content of acknowledged writes; of several, the first."""
        found: dict[Key, tuple[int, str]] = {}
        for call, _ in self._answered("write_rows"):
            for uid, token, digest in call.asked["rows"]:
                found.setdefault((uid, call.asked["stage"]), (token, digest))
        return found

    def content(self) -> Iterator[str]:
        """Fetched content must be what was acknowledged, or else what somebody tried to write."""
        acknowledged = {key: digest for key, (_, digest) in self._acknowledged().items()}
        tried: defaultdict[Key, set[str]] = defaultdict(set)
        for call in self._of("write_rows"):
            for uid, _, digest in call.asked["rows"]:
                tried[uid, call.asked["stage"]].add(digest)
        for call, answer in self._answered("fetch_rows"):
            for uid, stages in zip(call.asked["uids"], answer["rows"], strict=True):
                for stage, digest in stages.items():
                    expected = acknowledged.get((uid, stage))
                    right = digest == expected if expected else digest in tried[uid, stage]
                    if not right:
                        yield f"{uid}: the {stage} columns fetched are not those written"

    def batches(self) -> Iterator[str]:
        """Taking again is taking the same; whole groups of one attempt; no row older than allowed."""
        seen: dict[str, list[Any]] = {}
        for call, answer in self._answered("take"):
            name, rows = call.asked["batch_id"], answer["rows"]
            if seen.setdefault(name, rows) != rows:
                yield f"batch {name} was taken twice and differed"
            for task, members in groupby(rows, key=lambda row: row[1]):
                found = [uid for uid, _, _ in members]
                attempt = Uid.parse(found[0]).attempt
                if found != [f"run/{task}/{index}.{attempt}" for index in range(GROUP)]:
                    yield f"batch {name}: {found} is no whole group"
            for uid, _, oldest in rows:
                if call.asked["step"] - oldest > MAX_STALENESS:
                    yield f"{uid}: sampled at step {oldest}, taken for step {call.asked['step']}"

    def replays(self) -> Iterator[str]:
        """A trainer that went back is given the same groups in the same order, without those filtered.

        Groups that a trainer had in hand when it died may come later: the queue has others tried in between.
        """
        order: list[tuple[int, str]] = []
        expected: list[str] = []
        in_hand: list[str] = []
        postponed: set[str] = set()
        for call in self._of("acquire", "rewind", "take", "settle"):
            if call.verb == "acquire":
                postponed |= set(in_hand)
                in_hand = []
            elif call.answer is None:
                in_hand += expected[: BATCH * GROUP] if call.verb == "take" else []
            elif call.verb == "settle":
                in_hand = []
            elif call.verb == "rewind":
                again = [uid for step, uid in order if step >= call.asked["step"]]
                expected = [uid for uid in again if uid not in self.filtered] + expected
                order = [(step, uid) for step, uid in order if step < call.asked["step"]]
            else:
                batch = [uid for uid, _, _ in call.answer["rows"]]
                in_hand = batch
                if order and order[-1][0] == call.asked["step"]:
                    continue
                learned = [uid for uid in batch if uid not in self.filtered]
                firm = [uid for uid in expected if uid not in postponed]
                same = [uid for uid in learned if uid not in postponed]
                prefix = firm[: len(same)]
                if same[: len(prefix)] != prefix:
                    yield f"step {call.asked['step']} was {prefix[:1]}…, and is {same[:1]}… after a rewind"
                expected = [uid for uid in expected if uid not in learned]
                order += [(call.asked["step"], uid) for uid in batch]

    def exits(self) -> Iterator[str]:
        """No lease has a row that was committed or filtered before."""
        left = self._left_at()
        for call, answer in self._answered("lease", "take"):
            for uid, *_ in answer["rows"]:
                if left.get(uid, call.begun) < call.begun:
                    yield f"{uid} had left the run, and {call.who} was given it by {call.verb}"

    def _left_at(self) -> dict[str, int]:
        """When the first acknowledgement of each row's exit came."""
        found: dict[str, int] = {}
        for call, _ in self._answered("filter"):
            for uid in call.asked["uids"]:
                found.setdefault(uid, call.ended or 0)
        waiting = sorted(self.steps, key=lambda step: step[0], reverse=True)
        for call, _ in self._answered("commit"):
            while waiting and waiting[-1][0] < call.asked["step"]:
                for uid in waiting.pop()[1]:
                    found.setdefault(uid, call.ended or 0)
        return found

    def lineage(self) -> Iterator[str]:
        """The model learned what was taken, and every admitted task exactly once."""
        taken = {call.asked["step"]: answer["rows"] for call, answer in self._answered("take")}
        for step, rows in self.steps:
            given = [uid for uid, _, _ in taken.get(step, [])]
            if rows != [uid for uid in given if uid not in self.filtered]:
                yield f"step {step} learned other rows than the last take gave it"
        if [step for step, _ in self.steps] != list(range(len(self.steps))):
            yield "the model's steps have a hole"
        for uid, count in Counter(self.trained).items():
            if count > 1:
                yield f"{uid} was trained {count} times"
        lives = Counter(_row(uid) for uid in [*self.trained, *self.filtered])
        for number in range(int(self.final["cursor"] or 0)):
            for index in range(GROUP):
                count = lives.pop(f"{_task(number)}/{index}", 0)
                if count != 1:
                    yield f"{_task(number)}/{index} left the run {count} times"
        yield from (f"{row} was trained and never admitted" for row in lives)

    def ledger(self) -> Iterator[str]:
        """The ledger agrees with the recorded calls, at every reading and at the end."""
        for call in self._of("ledger"):
            if call.answer and not _balanced(call.answer):
                yield f"a ledger does not balance: {call.answer}"
        by_step = Counter({step: len(rows) for step, rows in self.steps})
        commit: Call | None = None
        for call, answer in self._answered("commit", "ledger"):
            if call.verb == "commit":
                commit = call
            elif commit:
                trained = sum(n for step, n in by_step.items() if step < commit.asked["step"])
                if answer["trained"] != trained:
                    yield f"{trained} rows were committed, the ledger said {answer['trained']}"
        reissued = sum(Uid.parse(uid).attempt for uid in [*self.trained, *self.filtered])
        expected = {
            "admitted": GROUP * int(self.final["cursor"] or 0) + reissued,
            "trained": len(self.trained),
            "filtered": {"unlucky": len(self.filtered)} if self.filtered else {},
            "stale": {"reissued": reissued} if reissued else {},
            "dead_lettered": {},
            "resident": {},
        }
        for name, value in expected.items():
            if self.final["ledger"][name] != value:
                yield f"the final ledger says {name} {self.final['ledger'][name]}, not {value}"


def _balanced(ledger: dict[str, Any]) -> bool:
    parts = ("filtered", "stale", "dead_lettered", "resident")
    left = ledger["trained"] + sum(sum(ledger[part].values()) for part in parts)
    return bool(ledger["admitted"] == left)


def _task(number: int) -> str:
    return f"t{number:06}"


def _row(uid: str) -> str:
    parsed = Uid.parse(uid)
    return f"{parsed.task}/{parsed.index}"
