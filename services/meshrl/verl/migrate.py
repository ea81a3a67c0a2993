"""A verl configuration becomes a recipe: each key meets its rule, then verl's defaults where ours differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from meshrl.common import bounded_yaml
from meshrl.common.checks import Loc
from meshrl.common.config import Config
from meshrl.config.checks import cross_checks
from meshrl.config.explain import Key, origin_of, value_text, walk
from meshrl.config.hub import MODELS, repository_of
from meshrl.config.loading import Written, read_yaml
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.recipe_defaults import defaults, merged, places
from meshrl.trainer.offline.config import SftConfig
from meshrl.verl.overrides import Override, parse
from meshrl.verl.programs import VerlCommand, VerlProgram, refuse_other
from meshrl.verl.rules import ENGINE_ARGUMENTS, KEYWORD, Given, KeyRule, KeyStatus
from meshrl.verl.scripts import EXTERNAL
from meshrl.verl.sft_table import rules as sft_rules
from meshrl.verl.table import rules

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
BY_PROGRAM = frozenset({"algorithm.adv_estimator", "actor.policy_loss.loss_mode"})
MOST_KEYS = 2000
"""Keys of one configuration; verl has some seven hundred."""
LONGEST_KEY = 500
"""Characters."""
MOST_SUGGESTIONS = 100
"""Unknown keys for which a known one is looked for that is spelt nearly so."""
MOST_REFERENCES = 200
"""References that are followed for the value of one key."""
LONGEST_TEXT = 100_000
"""Characters of a value with its references filled in."""
_COMPOSING = ("defaults", "hydra")
"""Sections of a YAML that say how Hydra puts it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result for one key that was given."""

    key: str
    value: Any
    status: KeyStatus
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A recipe, and what became of every key."""

    tree: dict[str, Any]
    """The recipe's sections."""
    comments: dict[Loc, str]
    """Comments beside keys of the recipe."""
    findings: tuple[Finding, ...]
    to_do: tuple[str, ...]
    """Complaints that `meshrl config check` would still have on this machine."""
    config: type[Config] = Recipe
    """The kind of recipe: of a mesh, or of `meshrl sft`."""

    def of(self, status: KeyStatus) -> list[Finding]:
        """The findings of one kind."""
        return [found for found in self.findings if found.status is status]


def migrate(
    overrides: Sequence[str],
    files: Sequence[Path] = (),
    *,
    name: str = "migrated",
    started: VerlCommand | None = None,
    environment: Mapping[str, str] | None = None,
) -> Migration:
    """Translate YAML files, then overrides, the last one winning.

    Args:
        overrides: Arguments of a verl command; options such as `--config-name` are passed over with a finding.
        files: YAML files of verl (or Hydra's saved `config.yaml`).
        name: The run's name where no experiment has one.
        started: The command whose program they were given to; None is `verl.trainer.main_ppo`.
        environment: Variables for `${oc.env:NAME}`.

    Raises:
        ConfigError: a program that trains nothing, a line that cannot be read, or a value that the recipe cannot
            hold; one line per problem.
    """
    if started is not None:
        refuse_other(started)
    values, origins, findings = _given(overrides, files, environment or {})
    if modules := (environment or {}).get(EXTERNAL):
        note = "modules that verl imports first, which may change anything: nothing of them is done here"
        findings.append(Finding(key=EXTERNAL, value=modules, status=KeyStatus.REFUSED, note=note))
    program = VerlProgram()
    if started is not None:
        program = started.program
        findings[:0] = [_of_program(started)] if started.name else []
    kind: type[Config] = SftConfig if program.sft else Recipe
    table = sft_rules() if program.sft else rules()
    given = Given(values, {found.key: found.default for found in table}, program)
    made = _Making(program, kind)
    for key, value in sorted(values.items(), key=lambda item: _place(table, item[0])):
        findings.append(made.take(key, value, given, table, origins.get(key, key)))
    for key, value in program.defaults.items():
        if key not in values:
            made.take(key, value, given, table, f"the default of {key}")
    made.fill(given, table)
    if program.sft:
        made.say(("output_dir",), f"runs/{name}/model", "")
    else:
        made.conventions(given)
        made.say(("run", "name"), name, "")
    written = Written(made.tree, {(): "the migrated recipe", **made.origins})
    to_do = []
    if program.sft:
        _check_offline(written)
    else:
        for at, said in cross_checks(written.with_algorithm().as_config(Recipe)):
            if not _of_hub(made.tree, at):
                to_do.append(f"{origin_of(written.origins, at)}: {said}")
    return Migration(
        tree=made.tree,
        comments=made.comments,
        findings=tuple(findings),
        to_do=tuple(to_do),
        config=kind,
    )


def _of_hub(tree: Any, at: Loc) -> bool:
    """Whether a key names a model that is downloaded once the recipe is read, and is no directory yet."""
    value = reduce(lambda part, key: part.get(key, {}), at, tree) if at in MODELS else None
    return repository_of(value, dataset=False, machine=ThisMachine()) is not None


class _Making:
    """The recipe while it is made."""

    def __init__(self, program: VerlProgram, kind: type[Config]) -> None:
        self.tree: dict[str, Any] = {}
        self.comments: dict[Loc, str] = {}
        self.origins: dict[Loc, str] = {}
        self._unknown = 0
        self._keys: dict[str, Key] = {key.dotted: key for key in walk(kind)}
        self._brought: set[tuple[str, ...]] = set()
        """Keys that the algorithm's name brings: no default of verl's is written over them."""
        for ours, value in program.settings.items():
            self.say(tuple(ours.split(".")), value, "what the program does")
        if program.algorithm:
            self.say(("algorithm", "name"), program.algorithm, "what the program computes")
            self._brought.update(places(defaults(program.algorithm)))

    def take(
        self, key: str, value: Any, given: Given, table: Sequence[KeyRule], origin: str
    ) -> Finding:
        """Apply the rule of a key that was given."""
        found = _rule_of(table, key)
        if found is None or _misspelt(table, found, key):
            self._unknown += 1
            note = "no key of verl that is known here"
            if self._unknown <= MOST_SUGGESTIONS:
                note += _meant(table, key)
            return Finding(key=key, value=value, status=KeyStatus.REFUSED, note=note)
        try:
            answer = found.convert(value, given)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{origin}: {value_text(value)} is not a value for it ({error})"
            ) from error
        settings = _below(found.key, key, answer.settings)
        added = {}
        for ours, setting in settings.items():
            if ours in BY_PROGRAM and tuple(ours.split(".")) in self._brought:
                note = f"{key} is not read by this program: algorithm.name"
                return Finding(key=key, value=value, status=KeyStatus.MAPPED, note=note)
            # verl's null is its default, ours has to be asked for.
            if setting is not None and self.say(
                tuple(ours.split(".")), setting, answer.note, origin
            ):
                added[ours] = setting
        if answer.engine_arguments:
            arguments = _named(found.key, key, answer.engine_arguments)
            self._engine(arguments, origin)
            added[ENGINE_ARGUMENTS] = list(arguments)
        return Finding(key=key, value=value, status=answer.status, settings=added, note=answer.note)

    def fill(self, given: Given, table: Sequence[KeyRule]) -> None:
        """Verl's defaults where a recipe's are others."""
        for found in table:
            if not found.take_default or found.key in given.values:
                continue
            answer = found.convert(found.default, given)
            for ours, setting in answer.settings.items():
                brought = tuple(ours.split(".")) in self._brought
                if setting is not None and not brought and self._differs(ours, setting):
                    note = f"verl's default; {answer.note}" if answer.note else "verl's default"
                    self.say(
                        tuple(ours.split(".")), setting, note, f"verl's default of {found.key}"
                    )

    def conventions(self, given: Given) -> None:
        """Apply verl's conventions behind the numbers, and what follows from several keys together."""
        conventions = "verl's numbers: docs/reference/differences-from-verl.md"
        self.say(("algorithm", "conventions"), "verl", conventions)
        reward = self.tree.get("reward", {})
        if not reward.get("judges") and "path" not in reward.get("custom_reward_function", {}):
            by_data_source = [{"name": "verl", "kwargs": {"conventions": "verl"}}]
            self.say(("reward", "functions"), by_data_source, conventions)
        if given.row_tokens > self._set_or("actor.ppo_max_token_len_per_gpu"):
            longest = "the longest row has this many tokens"
            self.say(("actor", "ppo_max_token_len_per_gpu"), given.row_tokens, longest, force=True)
        if self._set_or("queue.max_staleness") == 0 and self._set_or("rollout.name") == "vllm":
            self.say(("rollout", "deterministic"), False, "vLLM has no deterministic waves")

    def say(
        self, at: tuple[str, ...], value: Any, note: str, origin: str = "", *, force: bool = False
    ) -> bool:
        """Set one key unless it is set; True when it was."""
        here = self.tree
        for word in at[:-1]:
            here = here.setdefault(word, {})
        if at[-1] in here and not force:
            return False
        here[at[-1]] = value
        self.origins[at] = origin or "the migrated recipe"
        if note:
            self.comments[at] = note
        return True

    def _engine(self, arguments: Sequence[str], origin: str) -> None:
        self.say(tuple(ENGINE_ARGUMENTS.split(".")), [], "", origin)
        self.tree["rollout"]["engine"]["extra_args"].extend(arguments)

    def _differs(self, ours: str, value: Any) -> bool:
        key = self._keys.get(ours)
        return key is None or key.field.get_default(call_default_factory=True) != value

    def _set_or(self, ours: str) -> Any:
        """The value that is set, else the recipe's own default."""
        here: Any = self.tree
        for word in ours.split("."):
            here = here.get(word) if isinstance(here, Mapping) else None
        return (
            self._keys[ours].field.get_default(call_default_factory=True) if here is None else here
        )


def _of_program(started: VerlCommand) -> Finding:
    """The result for the program that is started."""
    program = started.program
    settings = dict(program.settings)
    if program.algorithm:
        settings["algorithm.name"] = program.algorithm
    status = KeyStatus.REFUSED if program.refused else KeyStatus.MAPPED
    return Finding(
        key="program", value=started.name, status=status, settings=settings, note=program.refused
    )


def _check_offline(written: Written) -> None:
    """Raises ConfigError for a value that the recipe cannot hold; a model that is not named is no problem yet."""
    least = {"model": {"path": "."}, "train_files": ["."]}
    Written(merged(written.tree, least), written.origins).as_config(SftConfig)


def _place(table: Sequence[KeyRule], key: str) -> int:
    found = _rule_of(table, key)
    return table.index(found) if found is not None else len(table)


def _rule_of(table: Sequence[KeyRule], key: str) -> KeyRule | None:
    for found in table:
        if found.fits(key):
            return found
    return None


def _misspelt(table: Sequence[KeyRule], found: KeyRule, key: str) -> bool:
    """Whether a key that only the rule of its section covers is nearly a key with its own rule."""
    if not found.key.endswith(".*"):
        return False
    section, _, word = key.rpartition(".")
    beside = [rule.key.rpartition(".") for rule in table]
    words = [last for at, _, last in beside if at == section and last != "*"]
    return bool(difflib.get_close_matches(word, words, n=1, cutoff=0.85))


def _below(pattern: str, key: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`a.*` to `b.*`: the rest of the key goes along."""
    if not pattern.endswith(".*"):
        return settings
    rest = key[len(pattern) - 1 :]
    return {
        ours.removesuffix("*") + rest if ours.endswith(".*") else ours: v
        for ours, v in settings.items()
    }


def _named(pattern: str, key: str, arguments: Sequence[str]) -> Sequence[str]:
    """`a.*` with KEYWORD: the rest of the key is the argument's name, `--max-seq-len` or `--config.level`."""
    if arguments[0] != KEYWORD:
        return arguments
    first, dot, below = key[len(pattern) - 1 :].partition(".")
    flag, text = f"{first.replace('_', '-')}{dot}{below}", arguments[1]
    if text in ("True", "False") and not dot:
        return (f"--{flag}" if text == "True" else f"--no-{flag}",)
    return (f"--{flag}", text.lower() if text in ("True", "False") else text)


def _meant(table: Sequence[KeyRule], key: str) -> str:
    near = difflib.get_close_matches(key, [found.key for found in table], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _given(
    overrides: Sequence[str], files: Sequence[Path], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str], list[Finding]]:
    """Leaf to value, leaf to where it was written, and what is no key at all."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    findings: list[Finding] = []
    for path in files:
        tree, lines = read_yaml(path)
        for section in _COMPOSING:
            if tree.pop(section, None) is not None:
                findings.append(_composition(section))
        for key, value in _leaves(tree):
            if key.endswith("._target_") or value == "???":
                continue
            values[key] = value
            origins[key] = lines.get(tuple(key.split(".")), str(path))
    words = list(_without_options(overrides, findings))
    _check_count(len(values) + len(words))
    wrong: list[str] = []
    for text in words:
        try:
            _apply(parse(text), values, origins, findings)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    _check_count(len(values))
    for key in values:
        if len(key) > LONGEST_KEY:
            raise ConfigError(
                f"a key of {len(key)} characters, of {LONGEST_KEY} at most: {key[:40]}..."
            )
    return _resolved(values, environment), origins, findings


def _check_count(keys: int) -> None:
    if keys > MOST_KEYS:
        raise ConfigError(f"{keys} keys, {MOST_KEYS} at most: this is not a file of verl")


def _composition(section: str) -> Finding:
    note = "the groups that it names are verl's own defaults; give your own files with --yaml, in their order"
    return Finding(key=section, value="...", status=KeyStatus.IGNORED, note=note)


def _without_options(words: Sequence[str], findings: list[Finding]) -> Iterator[str]:
    """Hydra's and a launcher's options are no overrides."""
    waiting = False
    for word in words:
        if waiting and "=" not in word:
            waiting = False
        elif word.startswith("-") and not re.match(r"-[^-=]*[.][^=]*=", word):
            option, equals, value = word.partition("=")
            waiting = not equals and option in (
                "-cn",
                "-cp",
                "-cd",
                "--config-name",
                "--config-path",
                "--config-dir",
            )
            note = "give the file with --yaml, unless it is one of verl's own"
            findings.append(Finding(key=option, value=value, status=KeyStatus.IGNORED, note=note))
        elif word.strip():
            waiting = False
            yield word


def _apply(
    override: Override, values: dict[str, Any], origins: dict[str, str], findings: list[Finding]
) -> None:
    key = override.key.split("@")[0].replace("/", ".")
    if override.delete or "@" in override.key or "/" in override.key:
        below = [k for k in values if k == key or k.startswith(f"{key}.")]
        for gone in below if override.delete else ():
            del values[gone]
        note = (
            "taken out: a recipe's own default holds"
            if override.delete
            else "a config group of verl's own"
        )
        status = KeyStatus.MAPPED if override.delete else KeyStatus.IGNORED
        findings.append(Finding(key=override.text, value=override.value, status=status, note=note))
        return
    for stale in [k for k in values if k.startswith(f"{key}.")]:
        del values[stale]
    leaves = dict(_leaves({key: override.value}))
    values |= leaves
    origins |= dict.fromkeys(leaves, f"command line: {override.text}")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolved(values: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Interpolations by what was given; what refers to a default is left to that default."""
    known = values | {f"oc.env:{name}": value for name, value in environment.items()}
    done: dict[str, Any] = {}
    for key, value in values.items():
        found = _resolve(value, key, known, iter(range(MOST_REFERENCES)))
        if found is not _LOST:
            done[key] = found
    return done


_LOST: Any = object()
"""Refers to something that was not given."""


def _resolve(value: Any, key: str, values: Mapping[str, Any], steps: Iterator[int]) -> Any:
    """`value` with its references filled in; `steps` says how many more may be followed."""
    if isinstance(value, list):
        items = [_resolve(item, key, values, steps) for item in value]
        return _LOST if _LOST in items else items
    while isinstance(value, str) and (found := _INTERPOLATION.search(value)):
        if next(steps, None) is None or len(value) > LONGEST_TEXT:
            raise ConfigError(
                f"{key}: {value:.100} refers to itself, or to more than {MOST_REFERENCES} values"
            )
        inner = _resolve(_referred(found[1], key, values), key, values, steps)
        if inner is _LOST:
            return _LOST
        if found[0] == value:
            return inner
        value = (
            value[: found.start()] + ("" if inner is None else str(inner)) + value[found.end() :]
        )
    return value


def _referred(inside: str, key: str, values: Mapping[str, Any]) -> Any:
    """The value of `${inside}`."""
    function, colon, arguments = inside.partition(":")
    if not colon:
        return values.get(_absolute(inside, key), _LOST)
    name, comma, default = (part.strip() for part in arguments.partition(","))
    fallback = bounded_yaml.load(default) if comma else _LOST
    if function == "oc.select":
        found = values.get(_absolute(name, key), _LOST)
        return fallback if found is _LOST else found
    if function == "oc.env":
        if not comma and f"oc.env:{name}" not in values:
            raise ConfigError(f"{key}: {name} is not given; give it with --env {name}")
        return values.get(f"oc.env:{name}", fallback)
    return _LOST


def _absolute(name: str, key: str) -> str:
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    return ".".join([*key.split(".")[:-dots], name[dots:]])
