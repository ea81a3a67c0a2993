"""Types of the registry: submission, version (manifest), name with its history, and how two versions differ."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import Json, Sample, Score
from meshrl.rewardd.pool.signatures import FunctionKind

HASH_DIGITS = 32
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a submission: a sample and the score that it must get."""

    solution: str
    score: float
    ground_truth: Json = None
    data_source: str = ""
    extra_info: Mapping[str, Json] = field(default_factory=dict)
    tolerance: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A reward function as submitted."""

    name: str
    """The name that will point to it: lower-case letters, digits, `.`, `_`, `-`."""
    source: str = ""
    """A Python file, or …"""
    wheel: bytes = b""
    """… a pure Python wheel."""
    entry_point: str = ""
    """A function of the file (`compute_score` when empty); of a wheel `module:function`."""
    kind: FunctionKind = FunctionKind.COMPUTE_SCORE
    deps: tuple[str, ...] = ()
    """Packages that it imports, by name or as `name==version`."""
    cases: tuple[Case, ...] = ()
    """Tests, run before acceptance; the submission is refused if one fails."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Lower limits than `reward.limits`, by the names of `Limits`; part of the version."""
    note: str = ""
    """A remark for people."""
    point: bool = True
    """Whether `name` points to it at once; False stores it for a comparison or a later roll-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json in a version's directory: what the content is and how it is called."""

    name: str
    """The name under which it was first submitted."""
    hash: str
    """32 hex digits: the version."""
    entry_point: str
    kind: FunctionKind
    content: str
    """The file beside this one: `source.py` or `<name>.whl`."""
    deps: tuple[str, ...] = ()
    limits: Mapping[str, Json] = field(default_factory=dict)
    """The limits it asked for; the operator's apply to the others."""

    @property
    def is_wheel(self) -> bool:
        """True for a wheel."""
        return self.content.endswith(".whl")

    def to_json(self) -> dict[str, Any]:
        """The manifest as stored on disk."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """The inverse. Raises CorruptError."""
        try:
            fields = {**value, "kind": FunctionKind(value["kind"]), "deps": tuple(value["deps"])}
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"the manifest of a reward version is broken: {error}") from error


class Action(StrEnum):
    """The kind of event in a name's history."""

    SUBMIT = "submit"
    """A version was accepted."""
    POINT = "point"
    """The name points to it from now on, after a submission or a roll-back."""
    RETIRE = "retire"
    """The version stops scoring."""


MOVES = 1000
"""Most POINT events that a name's history keeps: two versions may be submitted in turns for ever."""
WATCHED = "watch"
"""An action of earlier versions, which says nothing any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a name's history."""

    action: Action
    hash: str
    by: str
    at: float
    """Seconds since 1970."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name and its history, oldest first, from which everything else follows."""

    name: str
    history: tuple[Event, ...] = ()

    @property
    def versions(self) -> tuple[str, ...]:
        """Every hash that was submitted under it, oldest first."""
        return tuple(dict.fromkeys(e.hash for e in self.history if e.action is Action.SUBMIT))

    def submission(self, version: str) -> Event:
        """Time and submitter of the first version under this name."""
        return next(e for e in self.history if e.action is Action.SUBMIT and e.hash == version)

    @property
    def current(self) -> str:
        """The hash that it points to; empty while it points nowhere."""
        return next((e.hash for e in reversed(self.history) if e.action is Action.POINT), "")

    @property
    def previous(self) -> str:
        """The version submitted before the current one, without retired ones; empty when there is none."""
        older = self.versions[: self.versions.index(self.current)] if self.current else ()
        return next((version for version in reversed(older) if version not in self.retired), "")

    @property
    def retired(self) -> frozenset[str]:
        """Hashes that may not score any more."""
        return frozenset(e.hash for e in self.history if e.action is Action.RETIRE)

    @property
    def usable(self) -> frozenset[str]:
        """The versions that are not retired."""
        return frozenset(self.versions) - self.retired

    def after(self, *events: Event) -> Name:
        """A copy with more events; of POINT it keeps the last MOVES."""
        history = [*self.history, *events]
        moves = [event for event in history if event.action is Action.POINT]
        old = set(map(id, moves[:-MOVES]))
        return replace(self, history=tuple(e for e in history if id(e) not in old))

    def without(self, version: str) -> Name:
        """A copy that has no such version; one that was retired may still not come back."""
        kept = (e for e in self.history if e.hash != version or e.action is Action.RETIRE)
        return replace(self, history=tuple(kept))

    def to_json(self) -> Json:
        """The record as stored on disk."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Name:
        """The inverse; leaves WATCHED out. Raises CorruptError."""
        try:
            events = [
                Event(
                    action=Action(event["action"]),
                    hash=event["hash"],
                    by=event["by"],
                    at=event["at"],
                    note=event.get("note", ""),
                )
                for event in value["history"]
                if event["action"] != WATCHED
            ]
            return cls(name=value["name"], history=tuple(events))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"the history of a reward name is broken: {error}") from error


def content_hash(submission: Submission) -> str:
    """The version: SHA-256 over content, entry point, kind, dependencies and limits; not over the name."""
    digest = hashlib.sha256(submission.wheel or submission.source.encode("utf-8", "surrogatepass"))
    how = [submission.entry_point, submission.kind, sorted(submission.deps), bool(submission.wheel)]
    if submission.limits:
        how.append(sorted((name, float(limit)) for name, limit in submission.limits.items()))
    digest.update(json.dumps(how).encode())
    return digest.hexdigest()[:HASH_DIGITS]


def checked_name(name: str) -> str:
    """`name`, if it can be a name. Raises UserError."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name[:80]!r} cannot name a reward: want 1 to 64 of a-z 0-9 . _ -, the first a letter or digit"
        )
    return name


TOLERANCE = 1e-6
SHOWN = 5
SHOWN_TEXT = 200
"""Characters of a response, of its end: there the answer is."""


@dataclass(slots=True, kw_only=True)
class Differences:
    """Version `b` against version `a`."""

    a: str
    b: str
    rows: int = 0
    compared: int = 0
    """Rows that both have scored; the sums cover these."""
    equal: int = 0
    """Rows whose scores differ by at most 1e-6."""
    faults_a: int = 0
    faults_b: int = 0
    sum_a: float = 0.0
    sum_b: float = 0.0
    largest: list[tuple[float, str, float, float, str]] = field(default_factory=list)
    """(|difference|, uid, score a, score b, end of the response) of the rows that differ most."""

    def add(self, scored: Iterable[tuple[Sample, Score, Score]]) -> None:
        """Count rows, each with its scores by `a` and by `b`."""
        for sample, one, other in scored:
            self.rows += 1
            self.faults_a += not one.outcome.trainable
            self.faults_b += not other.outcome.trainable
            if not (one.outcome.trainable and other.outcome.trainable):
                continue
            self.compared += 1
            self.sum_a += one.score
            self.sum_b += other.score
            gap = abs(other.score - one.score)
            if gap <= TOLERANCE:
                self.equal += 1
                continue
            text = sample.solution[-SHOWN_TEXT:]
            heapq.heappush(self.largest, (gap, str(one.uid), one.score, other.score, text))
            if len(self.largest) > SHOWN:
                heapq.heappop(self.largest)

    @property
    def mean_a(self) -> float:
        """Over the compared rows; 0 without any."""
        return self.sum_a / self.compared if self.compared else 0.0

    @property
    def mean_b(self) -> float:
        """Over the compared rows; 0 without any."""
        return self.sum_b / self.compared if self.compared else 0.0

    @property
    def largest_first(self) -> Sequence[tuple[float, str, float, float, str]]:
        """The rows that differ most, the largest difference first."""
        return sorted(self.largest, reverse=True)
