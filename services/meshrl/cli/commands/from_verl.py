"""`meshrl config from-verl`: a verl command line or YAML becomes a recipe. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from meshrl.cli.options import PATH, json_option
from meshrl.common.files import replace_file
from meshrl.common.plain_text import counted, say, say_error, say_json
from meshrl.contract.errors import ConfigError, UserError
from meshrl.rpc.exit_codes import Exit


@click.command("from-verl", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, metavar="[-- VERL_COMMAND...]")
@click.option(
    "--script",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A launch script or a pasted command; - is stdin. It runs in a sandbox, and what it starts is not started.",
)
@click.option(
    "--yaml", "files", type=PATH, multiple=True, help="A YAML of verl; may be given several times."
)
@click.option(
    "--env",
    "passed",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="A variable that the script may see, besides HOME, LANG, PWD and USER; may be given several times.",
)
@click.option("-o", "--output", type=PATH, help="Write the recipe here; stdout if not given.")
@click.option("--force", is_flag=True, help="Replace the output if it is there.")
@click.option(
    "--strict", is_flag=True, help="Write nothing and exit with 2 when any key is refused."
)
@json_option
def from_verl(
    command: tuple[str, ...],
    script: Path | None,
    files: tuple[Path, ...],
    passed: tuple[str, ...],
    output: Path | None,
    force: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Translate a verl run into a recipe, and say what became of every key.

    The command stands after `--`, as in `meshrl config from-verl -o my.yaml -- python3 -m verl.trainer.main_ppo
    algorithm.adv_estimator=grpo ...`, in a --script (then its arguments stand after `--`), or its keys in a --yaml;
    overrides win over YAML.
    """
    if not command and script is None and not files:
        raise UserError(
            "nothing to translate: give a verl command after --, a --script or a --yaml"
        )
    if output is not None and output.exists() and not force:
        raise UserError(f"{output} is there already; choose another, or give --force")
    from meshrl.verl import written
    from meshrl.verl.migrate import migrate
    from meshrl.verl.programs import Command, Program, command_of
    from meshrl.verl.rules import Status
    from meshrl.verl.scripts import seen, started

    others: list[str] = []
    environment = seen(os.environ, passed)
    if script is not None:
        path = None if str(script) == "-" else script
        ours, others = started(_text(script), environment, path, command)
    else:
        ours = command_of(command) or Command(name="", arguments=command, program=Program())
    name = output.stem if output is not None else "migrated"
    migration = migrate(ours.arguments, files, name=name, started=ours, environment=environment)
    for other in others:
        say(f"the script also starts {other}: not translated", err=True)
    refused = len(migration.of(Status.REFUSED))
    # The recipe owns stdout where it has no file.
    if as_json:
        say_json(written.as_json(migration), err=output is None)
    else:
        for line in written.report(migration):
            say(line, err=output is None)
    if refused and strict:
        say_error(f"{counted(refused, 'key is', 'keys are')} refused; nothing was written")
        sys.exit(Exit.USER_ERROR)
    if output is None:
        say(written.recipe_text(migration).rstrip("\n"), lines=True)
        return
    replace_file(output, written.recipe_text(migration))
    if not as_json:
        check = f"check it with `meshrl config check {output}`, run it with `meshrl up {output}`"
        tune = f"run it with `meshrl sft {output}`"
        say(f"{output}: {tune if ours.program.sft else check}")


def _text(script: Path) -> str:
    if str(script) == "-":
        return sys.stdin.read()
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{script}: cannot be read: {reason}") from error
