"""Runs in a scoring process: turns a FunctionSpec into a callable, and what it returns into numbers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import math
import numbers
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

from meshrl.contract.errors import ConfigError, MeshError
from meshrl.contract.types import Json, Outcome, name_fault
from meshrl.rewardd.pool import verl_modules
from meshrl.rewardd.pool.messages import (
    MAX_COMPONENTS,
    MAX_FLOAT32,
    MAX_NAME,
    MAX_REASON,
    MAX_TEXT,
    MAX_TEXTS,
)
from meshrl.rewardd.pool.rule import SIGNATURE, FunctionSpec
from meshrl.rewardd.pool.signatures import (
    ARGUMENTS,
    FunctionKind,
    as_compute_score,
    takes_columns,
)

RESERVED = ("score", "token_rewards", "outcome")
"""Keys of a result that are not components."""


class BadScoreError(MeshError):
    """A function returned something that is not a score; says what, and what is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """One function, ready to be called with keywords."""

    spec: FunctionSpec
    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Arguments beside the sample: the user's kwargs, or the validated `config` of a built-in."""

    together: Callable[..., Any] | None = None
    """The batch function itself, for many samples in one call."""

    @property
    def concurrent(self) -> bool:
        """True for `async def`."""
        return inspect.iscoroutinefunction(self.call)

    def start_batch(self, samples: Sequence[Json]) -> list[Any]:
        """Call a batch function once with every sample.

        Raises:
            BadScoreError: it did not return a list with one score per sample.
        """
        assert self.together is not None
        columns = {
            plural: [sample[single] for sample in samples]
            for single, plural in zip(
                ARGUMENTS[FunctionKind.COMPUTE_SCORE], ARGUMENTS[FunctionKind.BATCH], strict=True
            )
        }
        results = self.together(**columns, **self.arguments)
        results = results.tolist() if hasattr(results, "tolist") else results
        if not isinstance(results, list | tuple) or len(results) != len(samples):
            size = f" of {len(results)}" if isinstance(results, Sized) else ""
            raise BadScoreError(
                f"{self.spec.name} returned {type(results).__name__}{size} for {len(samples)} samples; "
                "want a list, one score per sample"
            )
        return list(results)

    def start(self, sample: Json) -> Any:
        """Call the function; the result may be awaitable."""
        return self.call(
            data_source=sample["data_source"],
            solution_str=sample["solution_str"],
            ground_truth=sample["ground_truth"],
            extra_info=sample["extra_info"],
            **self.arguments,
        )


def load(spec: FunctionSpec) -> Scorer:
    """Import or compile a function and check that it can be called.

    Raises:
        ConfigError: it cannot be imported, found or called with verl's signature and its kwargs.
    """
    verl_modules.offer()
    module = _import(spec) if spec.module else _compile(spec)
    where = spec.path or spec.module
    call = getattr(module, spec.name, None)
    if not callable(call):
        raise ConfigError(
            f"{where} defines no function {spec.name!r} (wanted: {spec.name}{SIGNATURE})"
        )
    config = getattr(module, "Config", None)
    arguments: dict[str, Any] = dict(spec.kwargs)
    if spec.module and isinstance(config, type) and issubclass(config, pydantic.BaseModel):
        try:
            arguments = {"config": config(**spec.kwargs)}
        except pydantic.ValidationError as error:
            raise ConfigError(_refusal(spec, config, error)) from error
    if spec.kind is FunctionKind.COMPUTE_SCORE and takes_columns(_parameters(call)):
        spec = replace(spec, kind=FunctionKind.BATCH)
    _check_signature(where, spec, call, arguments)
    together = (
        call if spec.kind is FunctionKind.BATCH and not inspect.iscoroutinefunction(call) else None
    )
    call = as_compute_score(spec.kind, call)
    prepare = getattr(module, "prepare", None) if spec.module else None
    if prepare is not None:
        prepare()
    return Scorer(spec=spec, call=call, arguments=arguments, together=together)


def _import(spec: FunctionSpec) -> types.ModuleType:
    if spec.path and spec.path not in sys.path:
        sys.path.insert(
            0, spec.path
        )  # a pure Python wheel is a zip file that Python can import from
    try:
        return importlib.import_module(spec.module)
    except Exception as error:
        raise ConfigError(f"reward module {spec.module!r}: {describe(error)}") from error


def _compile(spec: FunctionSpec) -> types.ModuleType:
    """Execute `spec.source` as a module; like a script at `spec.path`, it can import from its folder."""
    module = types.ModuleType("meshrl_reward_" + spec.digest[:12])
    module.__file__ = spec.path
    folder = str(Path(spec.path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # dataclasses, typing and inspect find the module of a class by name; tracebacks find lines in linecache.
    sys.modules[module.__name__] = module
    linecache.cache[spec.path] = (
        len(spec.source),
        None,
        spec.source.splitlines(keepends=True),
        spec.path,
    )
    try:
        exec(compile(spec.source, spec.path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward file {spec.path} failed while loading: {describe(error)}"
        ) from error
    return module


def _refusal(
    spec: FunctionSpec, config: type[pydantic.BaseModel], error: pydantic.ValidationError
) -> str:
    lines = [f"{'.'.join(map(str, e['loc'])) or 'kwargs'}: {e['msg']}" for e in error.errors()]
    takes = ", ".join(config.model_fields) or "nothing"
    return f"kwargs of reward {spec.component!r}: {'; '.join(lines)} (it takes: {takes})"


def _parameters(call: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):
        return ()  # written in C: it has no signature to look at


def _check_signature(
    where: str, spec: FunctionSpec, call: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    name = spec.name
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # written in C: it has no signature to check
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS[spec.kind]), **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where}: {name}{signature} cannot be called: {error} (wanted: {name}{SIGNATURE}"
            + (f", called with {', '.join(arguments)})" if arguments else ")")
        ) from error


def describe(error: BaseException) -> str:
    """Type, message and the line of the user's code."""
    text = str(error) if isinstance(error, MeshError) else f"{type(error).__name__}: {error}"
    line = where(error)[:MAX_REASON]
    return text[: MAX_REASON - len(line)] + line


def where(error: BaseException) -> str:
    """` at file:line in function`: the frame nearest to the failure that is neither ours nor a library's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((str(Path(__file__).parents[1]), "<frozen"))
    ]
    users = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    if not frames:
        return ""
    nearest = (users or frames)[-1]
    return f" at {nearest.filename}:{nearest.lineno} in {nearest.name}"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers in the value of a function."""

    score: float
    others: Mapping[str, float]
    """Components: the other keys of a dict that are finite numbers."""
    dropped: Mapping[str, str]
    """Keys that are no component, and why: that costs no row its score."""


def numbers_of(result: Any, function: str) -> Numbers:
    """The score and, from a dict, its other numeric keys. Of a tuple the first entry counts, as verl has it.

    Raises:
        BadScoreError: the score is NaN, infinite or not a number, a dict lacks `score`, or a key may be no name.
    """
    if not isinstance(result, Mapping):
        first = result[0] if isinstance(result, tuple) and result else result
        return Numbers(_number(first, function), {}, {})
    if "score" not in result:
        keys = ", ".join(repr(key) for key in list(result)[:10]) or "no keys"
        raise BadScoreError(f"{function} returned a dict without 'score' (it has {keys})")
    others, dropped = dict[str, float](), dict[str, str]()
    for key, value in result.items():
        if key in RESERVED or isinstance(value, str):
            continue
        name = str(key)
        try:
            number = _number(value, f"{function}: key {name[:MAX_NAME]!r}")
        except BadScoreError as error:
            dropped[name[:MAX_NAME]] = error.message
            continue
        if fault := name_fault(name):
            raise BadScoreError(f"{function}: a component's name {name[:MAX_NAME]!r}: {fault}")
        others[name] = number
    return Numbers(_number(result["score"], f"{function}: key 'score'"), others, dropped)


def texts_of(result: Any) -> dict[str, str]:
    """The texts of a dict, cut to what is kept; those without a fit name, or beyond the number, are left out."""
    if not isinstance(result, Mapping):
        return {}
    found = {
        key: value[:MAX_TEXT]
        for key, value in result.items()
        if isinstance(key, str) and isinstance(value, str) and key not in RESERVED
    }
    fit = [key for key in found if not name_fault(key)]
    return {key: found[key] for key in fit[:MAX_TEXTS]}


def token_rewards_of(result: Any, function: str, length: int | None) -> list[float] | None:
    """The `token_rewards` of a dict: one number per response token; None when there are none.

    Raises:
        BadScoreError: no list of numbers, or another length than the response's.
    """
    rewards = result.get("token_rewards") if isinstance(result, Mapping) else None
    if rewards is None:
        return None
    rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(rewards, list | tuple):
        raise BadScoreError(
            f"{function}: key 'token_rewards' is {type(rewards).__name__}, not a list of numbers"
        )
    if length is not None and len(rewards) != length:
        raise BadScoreError(
            f"{function}: {len(rewards)} token_rewards for a response of {length} tokens"
        )
    return [_number(value, f"{function}: token_rewards[{n}]") for n, value in enumerate(rewards)]


def _outcome_of(result: Any, function: str) -> str | None:
    """`policy_fault` if the dict says so: the answer is bad, but its score counts."""
    outcome = result.get("outcome") if isinstance(result, Mapping) else None
    if outcome not in (None, Outcome.OK, Outcome.POLICY_FAULT):
        raise BadScoreError(
            f"{function}: key 'outcome' is {str(outcome)[:40]!r}; want 'ok' or 'policy_fault' (or raise)"
        )
    return str(outcome) if outcome else None


def _number(value: Any, what: str) -> float:
    """A float of whatever Python makes one of: bool, Decimal, arrays and tensors of one value; of no text."""
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadScoreError(
                f"{what} returned an array of several values, not a number"
            ) from error
    if not hasattr(value, "__float__"):
        shown = repr(value)[:80]
        raise BadScoreError(f"{what} returned {type(value).__name__} {shown}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise BadScoreError(f"{what} returned {type(value).__name__}: {error}") from error
    if math.isnan(number):
        raise BadScoreError(f"{what} returned NaN")
    if math.isinf(number):
        raise BadScoreError(f"{what} returned {'inf' if number > 0 else '-inf'}")
    if abs(number) > MAX_FLOAT32:
        raise BadScoreError(f"{what} returned {number}, too large for float32")
    return number


def combine(scorers: tuple[Scorer, ...], results: list[Any], length: int | None = None) -> Json:
    """The answer for one sample: the weighted sum of `results`, and every function's own score and keys by name.

    A function's keys keep their names when it is alone, else they are `component.key`. `token_rewards`, of
    `length` entries, add up with the same weights; the score of a function that gives none joins them at the last
    token. Below a gate there are none.

    Raises:
        BadScoreError: a function did not return a score.
    """
    total, components, plain = 0.0, {}, 0.0
    texts: dict[str, Json] = {}
    others: dict[str, float] = {}
    dropped: dict[str, str] = {}
    tokens: list[float] | None = None
    gated: float | None = None
    answer: dict[str, Json] = {}
    for scorer, result in zip(scorers, results, strict=True):
        name, weight = scorer.spec.component, scorer.spec.weight
        read = numbers_of(result, name)
        score = read.score
        total += weight * score
        if gated is None and scorer.spec.gate is not None and score < scorer.spec.gate:
            gated = weight * score
        components[name] = score
        prefix = "" if len(scorers) == 1 else f"{name}."
        others |= {prefix + key: value for key, value in read.others.items()}
        dropped |= {prefix + key: why for key, why in read.dropped.items()}
        texts |= {prefix + key: value for key, value in texts_of(result).items()}
        if (rewards := token_rewards_of(result, name, length)) is not None:
            if tokens is not None and len(tokens) != len(rewards):
                raise BadScoreError(f"{name}: {len(rewards)} token_rewards, others {len(tokens)}")
            weighted = [weight * reward for reward in rewards]
            tokens = [a + b for a, b in zip(tokens, weighted, strict=True)] if tokens else weighted
        else:
            plain += weight * score
        if outcome := _outcome_of(result, name):
            answer["outcome"] = outcome
    if tokens is not None and gated is None:
        if tokens:
            tokens[-1] += plain
        answer["token_rewards"] = tokens
    if texts:
        answer["texts"] = dict(list(texts.items())[:MAX_TEXTS])
    for key in list(others)[MAX_COMPONENTS - len(components) :]:
        dropped[key] = f"{key!r} is one of more than {MAX_COMPONENTS} components"
        del others[key]
    if dropped:
        answer["dropped"] = dict(list(dropped.items())[:MAX_COMPONENTS])
    total = total if gated is None else gated
    return {
        **answer,
        "score": _number(total, "the weighted sum"),
        "components": components | others,
    }
