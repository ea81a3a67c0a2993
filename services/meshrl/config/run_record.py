"""Remembers what a run began with, and compares a start with it before any service does any work.

    run.json    states: the beginning, then each start whose changes were accepted, with the step that it came at
    a state     the recipe, and the content of the files that it names: data, model, reward, program

A change that bends the run wants another name or `--accept-changes`; what the queue or the checkpoints hold cannot be
changed. A state is written before its start does any work. Where that start is killed, or trains nothing, the state
before continues as well. A directory of an earlier version has no run.json: its recipe.yaml is the beginning.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshrl.common.files import json_object, make_private, replace_file
from meshrl.config.changes import Change, Content, Effect, Mark, changes, content_of, shapes_of
from meshrl.config.loading import anchored, in_yaml, read_yaml, recorded
from meshrl.config.recipe import METRICS_NAME, RECIPE_NAME, Recipe, algorithm_needs
from meshrl.contract.errors import ConfigError, UserError
from meshrl.transferqueue.several_processes import refusal

RECORD_NAME = "run.json"
SHARDS_NAME = "queue.shards"
"""A note of how many processes the queue was, from when that could change."""
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of reading JSON of another form."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of metrics.jsonl that have the last training step."""
STEP_METRIC = "reward/mean"
"""A metric that each training step has."""
SAME_FILES = ("path", "tokenizer_path", "train_files", "val_files")
"""Last words of keys that only say where something is: as long as it is the same, it may lie elsewhere."""
LONGEST_VALUE = 80
"""Characters of a value that a line shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The recipe and files of one start of a run."""

    recipe: Recipe
    content: Content
    step: int
    """Steps that were trained when it was started."""
    at: str
    """ISO 8601, UTC."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """A hash of the names and shapes of the tensors of each trained model, by its key, where it is here."""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    """The policy's config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The starts of a run."""

    states: tuple[RunStart, ...]
    """The beginning, then every start whose changes were accepted."""
    fed: bool = False
    """The queue may hold prompts of it."""
    changed: bool = False
    """Changes were accepted at some time: the feeder may find other data than it fed."""

    @classmethod
    def load(cls, directory: Path) -> RecordedRun | None:
        """The record of the run in `directory`; None of one that has not begun.

        Raises:
            UserError: it is damaged.
        """
        directory = directory.absolute()
        path = directory / RECORD_NAME
        try:
            stored = json.loads(path.read_text())
            states = tuple(_decoded(each, directory) for each in stored["states"])
            if not states:
                raise ValueError("it has no state")
            found = cls(states=states, fed=stored["fed"], changed=stored["changed"])
        except FileNotFoundError:
            return cls._of_earlier_version(directory)
        except (
            PermissionError
        ):  # another user's: a service with credentials of its own sees nothing of it
            return None
        except (*MALFORMED, OSError, ConfigError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{path} cannot be read ({reason}): put it back from a copy, or remove it to take"
                f" {RECIPE_NAME} beside it as what the run began with"
            ) from error
        return found

    @classmethod
    def _of_earlier_version(cls, directory: Path) -> RecordedRun | None:
        path = directory / RECIPE_NAME
        if not path.exists():
            return None
        try:
            recipe = recorded(read_yaml(path)[0], directory)
        except ConfigError:
            return None
        return cls(states=(state_of(recipe, directory),), fed=recipe.queue_path.exists())

    def save(self, directory: Path) -> None:
        """Write it, unless it is there already. A reader sees all of it or the one before."""
        fields = {
            "fed": self.fed,
            "changed": self.changed,
            "states": [_encoded(state) for state in self.states],
        }
        text = json.dumps(fields, indent=1) + "\n"
        path = directory / RECORD_NAME
        if not path.exists() or path.read_text() != text:
            replace_file(path, text)


def begin(
    recipe: Recipe,
    *,
    accept_changes: bool,
    writes: bool = True,
    sections: Collection[str] | None = None,
) -> list[str]:
    """Compare a start with what the run began with, and remember it; one line for each reported change.

    Args:
        recipe: What is to be started.
        accept_changes: Also what bends the run.
        writes: False compares only.
        sections: Compare the files of these sections of the recipe only; None: of all.

    Raises:
        UserError: what was changed cannot be, or not without `accept_changes`; a line for each key.
        MeshError: rows have pictures in a store that is gone, or this is unknown.
    """
    directory = recipe.run.path.absolute()
    _refuse_stored_pictures(directory, recipe.run.name)
    if not writes:
        record = RecordedRun.load(directory)
        if record is None:
            return []
        return _judged(record, recipe, directory, accept_changes, sections)[1]
    make_private(directory, "run.dir")
    with _locked(directory):
        record = RecordedRun.load(directory)
        record, lines = _judged(record, recipe, directory, accept_changes, sections)
        record.save(directory)
    return lines


def _refuse_stored_pictures(directory: Path, run: str) -> None:
    """Raise UserError where the run kept pictures in the store of an earlier key, `data.media_store`."""
    try:
        states = json.loads((directory / RECORD_NAME).read_text())["states"]
        stores = {each["recipe"]["data"].get("media_store") for each in states} - {None}
    except (*MALFORMED, OSError):
        return  # none yet, or one that RunRecord.load tells of
    if stores:
        raise UserError(
            f"run {run} keeps pictures at {', '.join(sorted(stores))} (data.media_store), which no longer exists:"
            " continue with commit 9121209e, or choose another run.name"
        )


def refuse_several_queues(directory: Path) -> None:
    """Raises UserError where the run in `directory` is on several queue processes, as a note of `up` says."""
    note = directory / SHARDS_NAME
    if note.exists() and note.read_text().strip() != "1":
        raise refusal(f"{directory} is a run on several queue processes")


def mark_fed(directory: Path) -> None:
    """Note that the queue gets prompts of the run from here on, where its beginning is known."""
    # A feeder that may not write there, or finds no room, feeds all the same.
    with suppress(OSError):
        if not (directory / RECORD_NAME).exists():
            return
        with _locked(directory):
            record = RecordedRun.load(directory)
            if record is not None and not record.fed:
                replace(record, fed=True).save(directory)


def changes_accepted(directory: Path) -> bool:
    """Whether a user ever accepted changes that bend the run in `directory`."""
    with suppress(OSError):
        record = RecordedRun.load(directory) if (directory / RECORD_NAME).exists() else None
        return record is not None and record.changed
    return False


def state_of(
    recipe: Recipe,
    directory: Path,
    known: Content | None = None,
    sections: Collection[str] | None = None,
) -> RunStart:
    """The state of a start of `recipe` now. A file that is as in `known` is not read again."""
    whole = anchored(recipe)
    return RunStart(
        recipe=whole,
        content=content_of(whole, known or {}, sections),
        step=_steps_done(directory, whole),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        shapes={
            key: shapes
            for key, model in (("model.path", whole.model.path), ("critic.path", whole.critic.path))
            if model is not None and (shapes := shapes_of(model))
        },
        architecture=json_object(whole.model.path / "config.json"),
    )


def _judged(
    record: RecordedRun | None,
    recipe: Recipe,
    directory: Path,
    accept: bool,
    sections: Collection[str] | None,
) -> tuple[RecordedRun, list[str]]:
    known = record.states[-1].content if record is not None else None
    return judge(record, state_of(recipe, directory, known, sections), accept=accept)


def judge(
    record: RecordedRun | None, now: RunStart, *, accept: bool
) -> tuple[RecordedRun, list[str]]:
    """The record once `now` is started, and a line for each reported change. Writes nothing.

    Raises:
        UserError: as `begin`.
    """
    if record is None:
        return RecordedRun(states=(now,), changed=accept), []
    run, last = record.states[0].recipe.run.name, record.states[-1]
    held = list(_held(last, now))
    bent = _bent(record, last, now)
    if algorithm_needs(
        now.recipe
    ).data_answers:  # which are found by the numbers of rows, and some wait
        held += [
            f"{line}, whose answers rows in the queue wait for"
            for line in bent
            if line.startswith("data.")
        ]
    states = record.states
    if bent and not accept and (before := _without_untrained(record, now)):
        states, bent = before, []
    if held or (bent and not accept):
        raise UserError("\n".join(_refusal(run, now, held, [] if accept else bent)))
    if bent:
        states = (*states, now)
    elif not now.step and len(states) == 1:
        states = (now,)  # nothing was trained with what it was started with before
    else:  # files that were copied or touched are not read again the next time
        known = replace(states[-1], content={**states[-1].content, **now.content})
        states = (*states[:-1], known)
    changed = record.changed or bool(bent) or len(states) < len(record.states)
    told = [f"run {run}: {line}" for line in _told(states[0], now)]
    return replace(record, states=states, changed=changed), told


def _refusal(run: str, now: RunStart, held: Sequence[str], bent: Sequence[str]) -> Iterator[str]:
    directory = now.recipe.run.path
    for line in held:
        yield f"{line}: keep it, choose another run.name, or remove {directory} to begin anew"
    removed = "" if now.step else f" remove {directory} (nothing is trained yet),"
    for line in bent:
        yield f"{line}: run {run} would be another one; choose another run.name,{removed} or give --accept-changes"


def _held(last: RunStart, now: RunStart) -> Iterator[str]:
    """Changes of values that the queue or the checkpoints hold, a line each."""
    trained = now.step > 0
    for change in changes(last.recipe, now.recipe):
        if change.effect is Effect.QUEUE and (trained or _has_queue(last.recipe)):
            yield f"{_both(change)}, which the run's queue holds"
        elif change.effect is Effect.CHECKPOINTS and trained:
            yield f"{_both(change)}, which the run's checkpoints hold"
    if trained:
        yield from _held_models(last, now)
    if _leaves_queue(last.recipe, now.recipe):
        there = last.recipe.queue_path
        yield f"queue.path: {now.recipe.queue_path} has no queue, and the run's is in {there}"
    if _leaves_checkpoints(last.recipe, now.recipe):
        trainer = now.recipe.trainer
        key = f"trainer.default_local_dir: {now.recipe.checkpoint_dir} has no checkpoint"
        if trainer.resume_mode != "auto":
            key = f"trainer.resume_mode: {trainer.resume_mode}"
        there = last.recipe.checkpoint_dir
        yield f"{key}, and the run has checkpoints in {there}, whose rows have left its queue"


def _held_models(last: RunStart, now: RunStart) -> Iterator[str]:
    """Models whose tensors have other shapes than those of the checkpoints, and another base of their adapter."""
    for key, shapes in now.shapes.items():
        if last.shapes.get(key, shapes) != shapes:
            numbers = _other_architecture(last, now) if key == "model.path" else ""
            yield f"{key}: the model has another shape than that which the run's checkpoints hold{numbers}"
            return
    if now.recipe.model.lora_rank and (other := _other_weights(last, now)):
        yield f"model.path: {other} is not of the base model whose adapter the run's checkpoints hold"


def _leaves_checkpoints(had: Recipe, has: Recipe) -> bool:
    def any_in(recipe: Recipe) -> bool:
        return any(recipe.checkpoint_dir.glob("step-*"))

    uses = has.trainer.resume_mode == "auto" and any_in(has)
    return any_in(had) and not uses and _has_queue(has)


def _leaves_queue(had: Recipe, has: Recipe) -> bool:
    on_disk = had.queue.store == has.queue.store == "disk"
    return on_disk and _has_queue(had) and not _has_queue(has)


def _has_queue(recipe: Recipe) -> bool:
    """Whether the queue may know the run from before, as far as this machine tells."""
    if recipe.queue.store == "disk":
        return recipe.queue_path.exists()
    return recipe.queue.store != "memory"


def _bent(record: RecordedRun, last: RunStart, now: RunStart) -> list[str]:
    """Changes that make the rest of the run another one than its beginning, a line each."""
    found = {
        change.key: _both(change)
        for change in changes(last.recipe, now.recipe)
        if change.effect is Effect.BENDS and not _is_elsewhere(change.key, last, now)
    }
    for key, line in _other_content(last, now):
        found.setdefault(key, line)
    if not now.step:
        # Rows are scored again where the reward is another one, and nothing else was done with it yet.
        found = {k: v for k, v in found.items() if record.fed and not k.startswith("reward.")}
    return list(found.values())


def _without_untrained(record: RecordedRun, now: RunStart) -> tuple[RunStart, ...]:
    """The states up to the newest that `now` continues with, if nothing was trained since; else none."""
    for count in range(len(record.states) - 1, 0, -1):
        if record.states[count].step < now.step:
            break
        if not _bent(record, record.states[count - 1], now):
            return record.states[:count]
    return ()


def _told(began: RunStart, now: RunStart) -> list[str]:
    found = {change.key: _both(change) for change in changes(began.recipe, now.recipe)}
    for key, line in _other_content(began, now):
        found.setdefault(key, line)
    return list(found.values())


def _both(change: Change) -> str:
    """Old and new value."""
    return f"{change.key}: {_shown(change.now)}, and the run began with {_shown(change.before)}"


def _shown(value: Any) -> str:
    text = in_yaml(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _is_elsewhere(key: str, before: RunStart, now: RunStart) -> bool:
    """Whether a key names the same files at another place."""
    had, has = before.content.get(key), now.content.get(key)
    return key.rpartition(".")[2] in SAME_FILES and bool(had) and _digests(had) == _digests(has)


def _digests(marks: Sequence[Mark] | None) -> list[str]:
    return [mark.digest for mark in marks or ()]


def _other_content(before: RunStart, now: RunStart) -> Iterator[tuple[str, str]]:
    """Keys whose files have another content, and a line of each."""
    for key, has in now.content.items():
        had = before.content.get(key)
        if had is None or _digests(had) == _digests(has):
            continue
        there = {mark.digest for mark in had}
        other = [mark for mark in has if mark.digest not in there] or list(has)
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        yield key, f"{key}: {other[0].path}{more} is not as it was when the run began"


def _other_weights(before: RunStart, now: RunStart) -> str:
    """The first file of weights that is not as it was; empty if none is."""
    had = {mark.digest for mark in before.content.get("model.path", ())}
    weights = (m for m in now.content.get("model.path", ()) if m.name.endswith(".safetensors"))
    return next((mark.name for mark in weights if had and mark.digest not in had), "")


def _other_architecture(before: RunStart, now: RunStart) -> str:
    had, has = before.architecture, now.architecture
    numbers = [
        f"{key} {has[key]}, not {had[key]}"
        for key in had
        if isinstance(had[key], int) and isinstance(has.get(key), int) and had[key] != has[key]
    ]
    return f" ({'; '.join(numbers)})" if numbers else ""


def _steps_done(directory: Path, recipe: Recipe) -> int:
    """Training steps of a run, as its metrics tell; 1 or more where there is a checkpoint."""
    saved = 1 if any(recipe.checkpoint_dir.glob("step-*")) else 0
    try:
        with (directory / METRICS_NAME).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return saved
    for line in reversed(lines):
        try:
            metrics = json.loads(line)
            if STEP_METRIC in metrics:
                return max(saved, int(metrics["step"]) + 1)
        except (ValueError, KeyError, TypeError):
            continue
    return saved


def _encoded(state: RunStart) -> dict[str, Any]:
    return {
        "at": state.at,
        "step": state.step,
        "recipe": state.recipe.model_dump(mode="json"),
        "content": {
            key: [[mark.path, mark.size, mark.mtime_ns, mark.digest] for mark in marks]
            for key, marks in state.content.items()
        },
        "shapes": state.shapes,
        "architecture": dict(state.architecture),
    }


def _decoded(stored: Mapping[str, Any], directory: Path) -> RunStart:
    content = {
        key: tuple(Mark(*each) for each in marks) for key, marks in stored["content"].items()
    }
    return RunStart(
        recipe=recorded(stored["recipe"], directory),
        content=content,
        step=int(stored["step"]),
        at=stored["at"],
        shapes=stored["shapes"],
        architecture=stored["architecture"],
    )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Read and write the record of a directory one after the other; the kernel lets go of who dies."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
