"""Writes the reference pages that the code itself can tell: `make docs`. A test fails when one is out of date."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from meshrl.cli.root import cli
from meshrl.config.explain import Key, config_of, has_names, walk
from meshrl.config.recipe import Recipe
from meshrl.contract import plugins
from meshrl.contract.config import Config
from meshrl.contract.errors import MeshError
from meshrl.rpc.errors import status_of
from meshrl.rpc.exit_codes import Exit
from meshrl.testing.parity.cases import load
from meshrl.testing.parity.compare import Verdict, judge
from meshrl.trainer.algorithms.recipe_defaults import defaults
from meshrl.trainer.offline.config import DpoConfig, RewardModelConfig, SftConfig

ROOT = Path(__file__).parents[1]
REFERENCE = Path(__file__).parent / "reference"
PROGRAMS = "meshrl.rollout.programs"
NOTE = "<!-- Written by docs/generate.py (`make docs`): change the code, not this page. -->\n"
EXITS = {
    Exit.DONE: "done",
    Exit.FAILED: "something broke on our side; for `ledger`: it does not balance; for `health`: not ready",
    Exit.USER_ERROR: "a recipe, an option or a file is wrong: the same command would fail again",
    Exit.NO_PROGRESS: "`serve rollout`: its engine failed all the time, and no row was made",
    Exit.PORT_IN_USE: "`serve`: the port is somebody else's; another one would do",
}


MEASURED = ("<!-- measured: written by `make docs` -->\n", "<!-- end -->\n")
"""Around the one part of algorithms.md that is written here."""
ESTIMATOR_CASES = {
    "gae": ("compute_gae_advantage_return",),
    "dr_grpo": ("compute_grpo_outcome_advantage",),
    "prime": (
        "compute_rloo_advantage_return",
        "compute_detach_dpo_loss_rm",
        "compute_ce_dpo_loss_rm",
    ),
    "gigpo": ("compute_gigpo_outcome_advantage", "compute_step_discounted_returns"),
    "sppo": ("compute_advantage",),
    "preference": ("compute_onlinedpo_pref",),
}
LOSS_CASES = {"dpo": ("compute_online_dpo_loss",), "sppo": ("compute_sppo_loss",)}
"""Recorded functions whose names do not follow from an estimator's or a loss's."""
BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    """Write every page."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)


def pages() -> dict[str, str]:
    """File name to text."""
    return {
        "config.md": config_page(),
        "cli.md": cli_page(),
        "errors.md": errors_page(),
        "algorithms.md": algorithms_page(),
    }


def config_page() -> str:
    """Every key of a recipe, and of the commands that train on rows that are there already."""
    lines = [
        "# Keys of a recipe",
        NOTE,
        "The same text on a terminal: `meshrl config explain [KEY]`. Any key can be overridden on the command line",
        "as `a.b=c`; `meshrl config show RECIPE` prints a recipe with every default filled in.",
        "",
    ]
    for key in walk(Recipe):
        if len(key.path) == 1:
            names = ".<name>" if has_names(key.field.annotation) else ""
            lines += _section(key.dotted + names, key)
    for command, keys in (
        ("sft", SftConfig),
        ("dpo", DpoConfig),
        ("train-reward", RewardModelConfig),
    ):
        lines += [f"## Keys of `meshrl {command}`", "", *_table(keys)]
    for program in plugins.known(PROGRAMS):
        module = importlib.import_module(f"{PROGRAMS}.{program}")
        if hasattr(module, "Config"):
            lines += [f"## `rollout.program_options` of `{program}`", "", *_table(module.Config)]
    return "\n".join(lines)


def _section(title: str, key: Key) -> list[str]:
    section = config_of(key.field.annotation)
    assert section is not None
    where = Path(_source(section))
    link = os.path.relpath(where, REFERENCE)
    return [
        f"## `{title}`",
        "",
        f"{_doc(key)} ([`{section.__name__}`]({link}))",
        "",
        *_table(section),
    ]


def _table(section: type[Config]) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key in walk(section):
        inner = config_of(key.field.annotation)
        if inner is not None and key.default_text in ("{}", "required"):
            rows.append(f"| `{key.dotted}` | section | | {_doc(key) or _first_line(inner)} |")
        else:
            default = f"`{key.default_text}`".replace("`required`", "required")
            rows.append(f"| `{key.dotted}` | {key.type_text} | {default} | {_doc(key)} |")
    return [*rows, ""]


def _doc(key: Key) -> str:
    return " ".join((key.field.description or "").split()).replace("|", "\\|")


def _source(kind: type) -> str:
    import sys

    file = sys.modules[kind.__module__].__file__
    assert file is not None
    return file


def cli_page() -> str:
    """Every command and option."""
    lines = [
        "# Commands",
        NOTE,
        "`meshrl COMMAND --help` says the same. Options with a variable can be set in the environment instead.",
        "",
    ]
    root = click.Context(cli, info_name="meshrl")
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        lines += _command(command, click.Context(command, info_name=name, parent=root))
    return "\n".join(lines)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## `{context.command_path}`"
    yield ""
    yield f"`{' '.join([context.command_path, *command.collect_usage_pieces(context)])}`"
    yield ""
    yield " ".join((command.help or "").split())
    yield ""
    options = [option for option in command.params if isinstance(option, click.Option)]
    if options:
        yield "| option | variable | |"
        yield "|---|---|---|"
        for option in options:
            variable = f"`{option.envvar}`" if option.envvar else ""
            yield f"| `{', '.join(option.opts)}` | {variable} | {_option_help(option)} |"
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context))


def _option_help(option: click.Option) -> str:
    parts = [option.help or ""]
    if isinstance(option.type, click.Choice):
        parts.append(f"One of {', '.join(map(str, option.type.choices))}.")
    if isinstance(option.default, str | int) and not isinstance(option.default, bool):
        parts.append(f"Default: `{option.default}`.")
    return " ".join(part for part in parts if part).replace("|", "\\|")


def errors_page() -> str:
    """The tree of errors with their codes on the wire, and the exit codes."""
    lines = [
        "# Errors and exit codes",
        NOTE,
        "Every failure on purpose is one of these classes",
        "([`MeshError`](../../proto/meshrl/contract/errors.py)). It crosses the wire in the trailing metadata",
        "`meshrl-error-bin` with its code, its message and its values, and is raised again as the same class on the",
        "other side ([`STATUS`](../../services/meshrl/rpc/errors.py)); the gRPC status beside it is for people,",
        "proxies and dashboards.",
        "",
        "| class | code | gRPC status | try again? | |",
        "|---|---|---|---|---|",
        *_errors(MeshError),
        "",
        "## Exit codes of `meshrl`",
        "",
        "| code | |",
        "|---|---|",
        *(f"| {int(code)} | {EXITS[code]} |" for code in Exit),
        "| 130, 143 | stopped by Ctrl-C, by SIGTERM |",
        "",
        "A failure on purpose is one line on stderr, `error: …`; a traceback is a defect of ours.",
        "",
    ]
    return "\n".join(lines)


def _errors(kind: type[MeshError]) -> Iterator[str]:
    retry = "yes" if kind.retryable else ""
    status = status_of(kind("")).name
    yield f"| `{kind.__name__}` | `{kind.code}` | {status} | {retry} | {_first_line(kind)} |"
    for child in kind.__subclasses__():
        if child.__module__ == MeshError.__module__:
            yield from _errors(child)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def algorithms_page() -> str:
    """The page as it stands, with its table of what was measured written anew."""
    text = (REFERENCE / "algorithms.md").read_text()
    before, rest = text.split(MEASURED[0])
    return MEASURED[0].join((before, _measured() + MEASURED[1] + rest.split(MEASURED[1])[1]))


def _measured() -> str:
    """A row per named algorithm: recorded cases that pass now, and the curve that RESULTS.md has of it."""
    passed: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    for verdict in map(judge, load(ROOT / "tests" / "golden")):
        name = verdict.function.rpartition(".")[2]
        judged[name] += 1
        passed[name] += verdict.verdict is Verdict.PASSED

    def cases(names: tuple[str, ...]) -> str:
        counted = sum(judged[name] for name in names)
        return f"{sum(passed[name] for name in names)} of {counted}" if counted else "none recorded"

    curves = _curves()
    lines = [
        "| algorithm | estimator: cases passed | loss: cases passed | mean reward, start → end | curve |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(curves):
        settings = defaults(name)
        estimator = settings["algorithm"]["adv_estimator"]
        loss = settings["actor"].get("policy_loss", {}).get("loss_mode", "vanilla")
        its = ESTIMATOR_CASES.get(estimator, (f"compute_{estimator}_outcome_advantage",))
        their = LOSS_CASES.get(loss, (f"compute_policy_loss_{loss}",))
        start, end, *points = curves[name]
        lines.append(
            f"| `{name}` | `{estimator}`: {cases(its)} | `{loss}`: {cases(their)} | {start:.2f} → {end:.2f} |"
            f" {''.join(BARS[min(7, int(8 * point))] for point in points)} |"
        )
    return "\n".join(lines) + "\n"


def _curves() -> dict[str, list[float]]:
    """Algorithm to start, end and curve, from the table of benchmarks/learning.py in RESULTS.md."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    section = text.split("## Every named algorithm learns\n")[1].split("\n## ")[0]
    rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    return {
        name.strip("`"): [float(start), float(end), *map(float, curve.split())]
        for name, start, end, curve in rows
    }


if __name__ == "__main__":
    main()
