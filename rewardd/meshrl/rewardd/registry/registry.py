"""The registry: accepts versions, points names to them, and switches the run's judge when its name moves.

submit ── checks ── written ── loaded ── its tests ── name points to it ── the run switches
│                    │           │
└────────────────────┴───────────┴── refused: one line, nothing is kept
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.contract.errors import CapacityError, ConflictError, NotFoundError, UserError
from meshrl.contract.types import Sample, Score, Uid
from meshrl.rewardd.config import START_DEADLINE_S, RewardConfig
from meshrl.rewardd.registry.active_reward import ActiveRewardJudge, JudgeCache
from meshrl.rewardd.registry.checks import checked
from meshrl.rewardd.registry.store import SubmissionStore
from meshrl.rewardd.registry.types import (
    Action,
    Case,
    Differences,
    Event,
    Manifest,
    Name,
    Submission,
    checked_name,
    content_hash,
)

SHARE = 3 / 4
"""The part of all versions that one caller may have."""
MOST_NAMES = 16
"""Names that one version may have."""
AT_ONCE = 2
"""Submissions loaded and tested at once; further ones wait."""
MAX_SAMPLES = 4096
"""Most samples of one comparison or one trial."""
log = logging.getLogger(__name__)

RECIPE = "recipe"
"""Names the recipe's own functions wherever a version is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Result of a submission."""

    manifest: Manifest
    created: bool
    """False if this name had this version before."""
    cases: int
    """Number of tests that it passed."""
    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every name, and what scores the run."""

    names: Sequence[Name]
    followed: str
    """The name that the run follows."""
    scoring: str
    """Hash of the version that scores the run now."""
    base: str
    """Hash of the recipe's own functions."""


class Registry:
    """One per reward service. `by` names the caller in the history."""

    def __init__(
        self,
        store: SubmissionStore,
        cache: JudgeCache,
        judge: ActiveRewardJudge,
        config: RewardConfig,
        base: str,
    ) -> None:
        """Reads the names, and deletes versions that no name has.

        Args:
            store: Versions and names on disk.
            cache: Judges by version.
            judge: Scores the run.
            config: The `reward:` section.
            base: The version of the recipe's own functions, which scores while the run's name points nowhere.
        """
        self._store = store
        self._cache = cache
        self._judge = judge
        self._config = config
        self._base = base
        self._names = store.names()
        store.delete_all_but(self._usable())
        self._names_lock = asyncio.Lock()
        self._loading = asyncio.Semaphore(AT_ONCE)
        self._pending: Counter[str] = Counter()

    @property
    def judge(self) -> ActiveRewardJudge:
        """The judge that scores the run."""
        return self._judge

    @property
    def base(self) -> str:
        """The version of the recipe's own functions."""
        return self._base

    @property
    def followed(self) -> str:
        """The name that the run follows."""
        return self._config.registry.name

    async def start(self) -> None:
        """Load the version that scores the run, and say which: a submission outlives the run. Raises ConfigError."""
        await self._follow()
        name = self._names.get(self.followed)
        if name is None or not name.current:
            log.info("the recipe's own functions score the run: version %s", self._base)
            return
        submitted = name.submission(name.current)
        log.warning(
            "the run is scored by version %s of the reward %r, submitted %s by %s, not by the recipe's functions"
            " (`meshrl reward rollback %s recipe` goes back to them)",
            name.current,
            name.name,
            _when(submitted.at),
            submitted.by or "nobody",
            name.name,
        )

    def names(self) -> Sequence[Name]:
        """Every name, sorted."""
        return [self._names[name] for name in sorted(self._names)]

    def listing(self) -> Listing:
        """Every name, and what scores the run."""
        return Listing(
            names=self.names(),
            followed=self.followed,
            scoring=self._judge.reward_hash,
            base=self._base,
        )

    def name(self, name: str) -> Name:
        """One name. Raises NotFoundError with the nearest name, UserError for text that cannot be a name."""
        if checked_name(name) not in self._names:
            near = difflib.get_close_matches(name, self._names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NotFoundError(f"no reward is called {name!r}{hint}")
        return self._names[name]

    def resolve(self, name: str, version: str = "") -> str:
        """The full hash of a version of `name`: the current one if `version` is empty, else the one that starts so.

        Raises:
            NotFoundError: no version, or several.
        """
        if version == RECIPE and name == self.followed:
            return self._base
        entry = self.name(name)
        if not version:
            if not entry.current:
                raise NotFoundError(
                    f"reward {name!r} points to no version; name one of {_short(entry)}"
                )
            return entry.current
        matching = [known for known in entry.versions if known.startswith(version)]
        if len(matching) != 1:
            what = "no version" if not matching else f"{len(matching)} versions"
            raise NotFoundError(
                f"reward {name!r} has {what} that start with {version[:40]!r}; it has {_short(entry)}"
            )
        return matching[0]

    def version(self, name: str, version: str) -> tuple[Manifest, bytes, tuple[Case, ...]]:
        """One version with what was submitted and the tests that came with it. Raises NotFoundError."""
        target = self.resolve(name, version)
        return self.manifest(target), self.content(target), self._store.cases(target)

    def manifest(self, version: str) -> Manifest:
        """The manifest of a version. Raises NotFoundError."""
        return self._store.manifest(version)

    def content(self, version: str) -> bytes:
        """The submitted file. Raises NotFoundError."""
        return self._store.content(version)

    def diff(self, name: str, old: str, new: str) -> str:
        """A unified diff of two sources. Raises NotFoundError, UserError for wheels."""
        versions = self.resolve(name, old), self.resolve(name, new)
        texts = []
        for version in versions:
            if version == self._base or self.manifest(version).is_wheel:
                raise UserError(f"version {version} is not a single source file: there is no diff")
            texts.append(self.content(version).decode().splitlines(keepends=True))
        labels = [f"{name}@{version}" for version in versions]
        return "".join(difflib.unified_diff(texts[0], texts[1], labels[0], labels[1]))

    async def submit(self, by: str, submission: Submission) -> Accepted:
        """Accept a version, or refuse it and keep nothing of it.

        Raises:
            UserError: it does not parse, load or pass its tests; details `line` or `test` say where.
            ConflictError: this version of this name was retired.
            CapacityError: too many versions score now or are being submitted, or it has too many names.
        """
        config = self._config
        submission = await asyncio.to_thread(
            checked, submission, config.registry, config.submitted_limits
        )
        version = content_hash(submission)
        before = self._names.get(submission.name, Name(name=submission.name))
        _refuse_retired(before, version)
        self._pending[version] += 1
        try:
            async with self._loading:
                await self._make_room(by, version, submission.name)
                manifest = await asyncio.to_thread(self._store.add, submission)
                await self._cache.hold(version)
                try:
                    await self._test(version, submission.cases)
                    name = await self._record(submission, version, by)
                finally:
                    self._cache.release(version)
        finally:
            self._pending[version] -= 1
            self._forget(version)
        return Accepted(
            manifest=manifest,
            created=version not in before.versions,
            cases=len(submission.cases),
            name=name,
        )

    async def roll_back(self, by: str, name: str, version: str) -> Name:
        """Point `name` to `version`; if empty, to the version before the current one.

        `recipe` as the version lets the recipe's own functions score again: the name then points to nothing.

        Raises:
            ConflictError: there is no version before, or `version` is retired.
        """
        async with self._names_lock:
            entry = self.name(name)
            target = self.resolve(name, version) if version else entry.previous
            if not target:
                raise ConflictError(
                    f"reward {name!r} has no version before {entry.current or 'the first'}"
                    f" ({RECIPE!r} names the recipe's own functions)"
                )
            if target == self._base:
                if entry.current:
                    moved = _event(Action.POINT, "", by, note="roll back to the recipe")
                    entry = await self._append(entry, moved)
                return entry
            _refuse_retired(entry, target)
            async with self._cache.borrow(target):
                if target != entry.current:
                    moved = _event(Action.POINT, target, by, note="roll back")
                    entry = await self._append(entry, moved)
            return entry

    async def retire(self, by: str, name: str, version: str) -> Name:
        """Forbid `version` to score under `name`, and delete what no other name may use; idempotent.

        A name that the run does not follow then points to nothing, if it pointed to `version`.

        Raises:
            ConflictError: the run's name points to it.
        """
        async with self._names_lock:
            entry = self.name(name)
            target = self.resolve(name, version)
            if target == self._base:
                raise ConflictError("the recipe's own functions cannot be retired: edit the recipe")
            if target == entry.current and name == self.followed:
                raise ConflictError(
                    f"reward {name!r} points to {target}: roll back or submit another first"
                )
            events = [_event(Action.POINT, "", by)] if target == entry.current else []
            if target not in entry.retired:
                entry = await self._append(entry, *events, _event(Action.RETIRE, target, by))
            if not (self._pending[target] or self._cache.held(target)):
                self._forget(target)
            return entry

    async def score(self, name: str, version: str, samples: Sequence[Sample]) -> Sequence[Score]:
        """Score `samples` with a version of `name`; nothing of it enters the run. Raises NotFoundError."""
        _check_count(samples)
        target = self.resolve(name, version)
        async with self._cache.borrow(target) as judge:
            return await judge.score(samples)

    async def compare(self, name: str, a: str, b: str, samples: Sequence[Sample]) -> Differences:
        """Score `samples`, or those that the run scored last, with two versions. Raises NotFoundError."""
        _check_count(samples)
        versions = self.resolve(name, a), self.resolve(name, b)
        samples = list(samples or self._judge.recent)
        differences = Differences(a=versions[0], b=versions[1])
        async with self._cache.borrow(versions[0]) as one, self._cache.borrow(versions[1]) as other:
            scores = await asyncio.gather(one.score(samples), other.score(samples))
        differences.add(zip(samples, *scores, strict=True))
        return differences

    async def _make_room(self, by: str, version: str, name: str) -> None:
        """Delete a version of the user with the most, or of `by` at its share, if the store is full.

        First come those that no name ever pointed to, then those that one did, then those that a name points to
        which the run does not follow; of equal ones the version that was submitted or pointed to longest ago.

        Raises:
            CapacityError: none can go, and `by` has as many versions as one caller may have; or too many names.
        """
        async with self._names_lock:
            names = self._names.values()
            having = {each.name for each in names if version in each.versions}
            if name not in having and len(having) >= MOST_NAMES:
                some = ", ".join(sorted(having)[:3])
                raise CapacityError(
                    f"version {version} has {len(having)} names, and may have no more: {some}, …"
                )
            events = [e for each in names for e in each.history if e.hash in each.usable]
            submitted: dict[str, Event] = {}
            moved: dict[str, Event] = {}
            last: dict[str, float] = {}
            for event in sorted(events, key=lambda event: event.at):
                last[event.hash] = event.at
                {Action.SUBMIT: submitted, Action.POINT: moved}[event.action].setdefault(
                    event.hash, event
                )
            count = Counter(event.by for event in submitted.values())
            most = max(1, int(self._config.registry.max_versions * SHARE))
            greedy = count[by] >= most
            if version in submitted or not (greedy or self._store.full):
                return
            current = {each.current for each in names}
            can_go = [
                known
                for known, event in submitted.items()
                if (event.by == by or not greedy)
                and not self._pending[known]
                and not self._cache.held(known)  # it scores
            ]
            if not can_go and greedy:
                raise CapacityError(
                    f"{by or 'this caller'} has {most} versions, and may have no more"
                )
            if not can_go:
                return  # the store refuses
            gone = min(
                can_go,
                key=lambda known: (
                    -count[submitted[known].by],
                    known in current,
                    known in moved,
                    last[known],
                ),
            )
            for each in [each for each in names if gone in each.versions]:
                left = each.without(gone)
                if each.current == gone:
                    left = left.after(_event(Action.POINT, "", by, note=f"{gone} made room"))
                if left.versions or left.retired:
                    self._store.save(left)
                    self._names[each.name] = left
                else:
                    self._store.remove_name(each.name)
                    del self._names[each.name]
            await asyncio.to_thread(self._store.remove, gone)
            log.info("reward version %s is deleted to make room", gone)

    async def _test(self, version: str, cases: Sequence[Case]) -> None:
        """Raises UserError naming the first test that fails."""
        samples = [
            Sample(
                uid=Uid("test", "case", number),
                data_source=case.data_source,
                solution=case.solution,
                ground_truth=case.ground_truth,
                extra_info=case.extra_info,
            )
            for number, case in enumerate(cases)
        ]
        limit_s = START_DEADLINE_S
        try:
            async with asyncio.timeout(limit_s), self._cache.borrow(version) as judge:
                scores = await judge.score(samples)
        except TimeoutError as error:
            raise UserError(
                f"the {len(cases)} tests did not end within {limit_s:g} s together"
            ) from error
        for number, (case, score) in enumerate(zip(cases, scores, strict=True)):
            if not score.outcome.trainable:
                raise UserError(f"test {number} got no score: {score.reason}", test=number)
            if not abs(score.score - case.score) <= case.tolerance:
                raise UserError(
                    f"test {number} failed: the score is {score.score:g}, expected {case.score:g}"
                    f" (solution {case.solution[:60]!r})",
                    test=number,
                )

    async def _record(self, submission: Submission, version: str, by: str) -> Name:
        async with self._names_lock:
            name = self._names.get(submission.name, Name(name=submission.name))
            _refuse_retired(name, version)
            events = []
            if version not in name.versions:
                events.append(_event(Action.SUBMIT, version, by, note=submission.note))
            if submission.point and version != name.current:
                events.append(_event(Action.POINT, version, by))
            return await self._append(name, *events) if events else name

    async def _append(self, name: Name, *events: Event) -> Name:
        """Make it durable, then visible, then effective. The version is loaded already, so nothing here waits."""
        moved = name.after(*events)
        self._store.save(moved)
        self._names[name.name] = moved
        if name.name == self.followed:
            await self._follow()
        return moved

    async def _follow(self) -> None:
        name = self._names.get(self.followed)
        current = name.current if name else ""
        await self._judge.follow(current or self._base)

    def _usable(self) -> set[str]:
        """The versions of all names."""
        return {version for name in self._names.values() for version in name.usable}

    def _forget(self, version: str) -> None:
        """Delete a version that no name may use and no submission is about to."""
        if self._pending[version]:
            return
        del self._pending[version]
        if version not in self._usable():
            self._store.remove(version)


def _event(action: Action, version: str, by: str, *, note: str = "") -> Event:
    return Event(action=action, hash=version, by=by, at=time.time(), note=note)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _refuse_retired(name: Name, version: str) -> None:
    if version in name.retired:
        raise ConflictError(f"version {version} of reward {name.name!r} was retired", hash=version)


def _check_count(samples: Sequence[Sample]) -> None:
    if len(samples) > MAX_SAMPLES:
        raise UserError(f"{len(samples)} samples; at most {MAX_SAMPLES} at once")


def _short(name: Name) -> str:
    return ", ".join(name.versions[-5:]) or "none"
