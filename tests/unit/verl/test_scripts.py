"""Launch scripts as they are: bash runs them in the strict sandbox, and the program that is started counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml
from click.testing import CliRunner

from meshrl.cli.commands.config import config
from meshrl.config.loading import in_yaml, read_yaml, recipe_yaml
from meshrl.contract.errors import ConfigError, UserError
from meshrl.sandbox.sandbox import no_bubblewrap
from meshrl.verl import migrate, scripts
from meshrl.verl.programs import command_of
from meshrl.verl.rules import KeyStatus
from meshrl.verl.scripts import started
from meshrl.verl.written import recipe_text, report

sandboxed = pytest.mark.skipif(no_bubblewrap() is not None, reason=f"{no_bubblewrap()}")

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
ulimit -n 65535
source ~/nowhere/env.sh
cd "$(dirname "$0")/.."
ROOT=$(pwd)
mkdir -p /nowhere/logs
if python3 -c 'import torch_npu' 2>/dev/null; then DEVICE=npu; else DEVICE=cuda; fi
HALF=$(python3 -c 'print(8 // 2)')
GIVEN=(data.train_batch_size=$((HALF * 2)) "actor_rollout_ref.model.path=$ROOT/a model")
case ${1:-none} in
    none) ;;
    *) GIVEN+=(trainer.nnodes=$1); shift ;;
esac
ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo "${GIVEN[@]}" trainer.device=$DEVICE "$@" | tee log.txt
"""


@sandboxed
def test_a_script_with_branches_substitutions_and_arrays_is_read_as_bash_reads_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "scripts" / "run.sh"
    file.parent.mkdir()
    file.write_text(SCRIPT)
    command, others = started(SCRIPT, {"HOME": "/h"}, file, ["2", "a.b=x y"])
    assert command.name == "recipe.dapo.main_dapo" and not others
    assert list(command.arguments) == [
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={tmp_path}/a model",
        "trainer.nnodes=2",
        "trainer.device=cuda",
        "a.b=x y",
    ]


@sandboxed
def test_a_script_sees_none_of_the_users_files_and_changes_none(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("k")
    script = f"""
    python3 -m verl.trainer.main_ppo "read=$(cat {secret})" "shadow=$(head -c1 /etc/shadow)"
    echo gone > {secret}; command rm -f {secret}
    """
    file = tmp_path / "run.sh"
    file.write_text(script)
    assert started(script, {}, file)[0].arguments == ("read=", "shadow=")
    assert secret.read_text() == "k"


@sandboxed
def test_the_first_program_that_trains_is_translated_and_the_others_are_named() -> None:
    script = """
    python3 -m verl.trainer.main_generation model.path=m
    torchrun --nproc_per_node=2 -m verl.trainer.main_ppo a.b=1 $@
    python3 -m verl.trainer.main_eval data.path=x
    """
    command, others = started(script, {}, None, ["c.d=2"])
    assert (command.name, command.arguments) == ("verl.trainer.main_ppo", ("a.b=1", "c.d=2"))
    assert others == ["verl.trainer.main_generation", "verl.trainer.main_eval"]


@sandboxed
def test_an_override_that_the_script_does_not_pass_on_is_added() -> None:
    command, _ = started("python3 -m verl.trainer.main_ppo a.b=1", {}, None, ["c.d=2"])
    assert command.arguments == ("a.b=1", "c.d=2")


@sandboxed
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("set -u\npython3 -m verl.trainer.main_ppo a=$X", r"line 2: X: unbound variable"),
        ("echo 'Usage: run.sh N'; exit 3", r"exit code 3 and started no program: Usage: run.sh N"),
        ("python3 other.py", r"no verl command found"),
        ("python3 -m verl.trainer.main_ppo a=$(exit", r"exit code 2"),
    ],
)
def test_a_script_that_starts_nothing_is_one_line_that_says_why(script: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        started(script, {})
    assert "\n" not in str(caught.value)


@sandboxed
def test_a_script_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "LIMITS", scripts.LIMITS.model_copy(update={"deadline_s": 0.5}))
    with pytest.raises(ConfigError, match=r"did not end within 0.5 s and started no program"):
        started("while true; do :; done", {})
    command, _ = started("python3 -m verl.trainer.main_ppo a=1; while true; do :; done", {})
    assert command.arguments == ("a=1",)


def test_without_a_sandbox_no_script_runs_and_the_command_itself_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scripts, "no_bubblewrap", lambda: "bubblewrap is missing")
    said = r"^a script runs in a sandbox, and bubblewrap is missing: give the command itself, after `--`"
    with pytest.raises(ConfigError, match=said):
        started("python3 -m verl.trainer.main_ppo a=1", {})


def test_a_pasted_list_of_overrides_is_a_command_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "no_bubblewrap", lambda: None)
    monkeypatch.setattr(scripts, "launched", lambda *_: [])
    assert started("a.b=1 \\\n 'c.d=[x, y]'", {})[0].arguments == ("a.b=1", "c.d=[x, y]")
    for script in ("ls\npwd", "A=$(nproc)", "a.b='x"):
        with pytest.raises(ConfigError, match=r"^no verl command found"):
            started(script, {})


def of(line: str) -> dict[str, object]:
    """The settings of a command's recipe, dotted."""
    words = line.split()
    command = command_of(words)
    assert command is not None
    made = migrate(command.arguments, started=command)

    def leaves(tree: dict[str, object], at: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in tree.items():
            found |= leaves(value, f"{at}{key}.") if isinstance(value, dict) else {at + key: value}
        return found

    return leaves(made.tree)


@pytest.mark.parametrize(
    ("program", "algorithm"),
    [
        ("recipe.spin.main_spin", "spin"),
        ("recipe/sppo/main_sppo.py", "sppo"),
        ("recipe.prime.main_prime", "prime"),
    ],
)
def test_the_program_names_the_algorithm_whatever_its_keys_say(
    program: str, algorithm: str
) -> None:
    made = of(f"python3 -m {program} algorithm.adv_estimator=rloo")
    assert made["algorithm.name"] == algorithm
    assert "algorithm.adv_estimator" not in made
    assert "actor.policy_loss.loss_mode" not in made


def test_a_program_that_does_what_nothing_here_does_is_refused_and_read_as_ppo() -> None:
    for name, said in (("recipe.flowrl.main_flowrl", "FlowRL"), ("my_main.py", "not a program")):
        command = command_of(["python3", "-m", name, "data.seed=1"])
        assert command is not None
        first = migrate(command.arguments, started=command).findings[0]
        assert (first.key, first.status) == ("program", KeyStatus.REFUSED)
        assert said in first.note


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("verl.trainer.main_generation_server", "meshrl eval"),
        ("verl.trainer.main_eval", "meshrl eval"),
        ("verl.model_merger", "meshrl export"),
    ],
)
def test_a_program_that_trains_nothing_is_refused_with_the_command_of_ours(
    program: str, said: str, tmp_path: Path
) -> None:
    written = tmp_path / "made.yaml"
    arguments = ["from-verl", "-o", str(written), "--", "python3", "-m", program, "merge"]
    done = CliRunner().invoke(config, arguments)
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)
    assert not written.exists()


FULLY = "python3 -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0"
ASYNC = "async_training"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=32"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        # (1 + 0.1) x 4 batches may be sampled between two versions: 4.4 with verl's defaults
        ("", {"queue.max_staleness": 4, "data.train_batch_size": 256}),
        (f"{ASYNC}.staleness_threshold=0 {ASYNC}.trigger_parameter_sync_step=1", {"queue.max_staleness": 0}),
        (f"{ASYNC}.staleness_threshold=0", {"queue.max_staleness": 3}),
        (f"{ASYNC}.staleness_threshold=0.5", {"queue.max_staleness": 5}),
        (f"{ASYNC}.require_batches=4 {MINI}", {"data.train_batch_size": 128, "actor.ppo_mini_batch_size": 32}),
        (f"{ASYNC}.partial_rollout=False", {"rollout.on_update": "drain"}),
        (f"rollout.total_rollout_steps=3200 {MINI}", {"trainer.total_training_steps": 100}),
        ("rollout.nnodes=2 rollout.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4",
         {"rollout.workers": 4, "placement.rollout": 4}),
        ("actor_rollout_ref.actor.use_rollout_log_probs=True", {"actor.recompute_old_log_probs": False}),
        ("actor_rollout_ref.actor.use_rollout_log_probs=False", {"actor.recompute_old_log_probs": True}),
    ],
)  # fmt: skip
def test_a_fully_asynchronous_command_says_the_same_here(
    given: str, says: dict[str, object]
) -> None:
    made = of(f"{FULLY} {given}")
    assert {key: made.get(key, 0 if key == "queue.max_staleness" else None) for key in says} == says


def test_one_step_off_is_one_step_off() -> None:
    made = of("python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_batch_size=64")
    assert (made["queue.max_staleness"], made["data.train_batch_size"]) == (1, 64)


@sandboxed
def test_the_command_line_gives_what_follows_to_the_script(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text('N=$1; shift; python3 -m verl.trainer.main_ppo data.seed=$N "$@"')
    arguments = ["from-verl", "--script", str(file), "--", "3", "data.train_batch_size=9"]
    done = CliRunner().invoke(config, arguments)
    assert done.exit_code == 0, done.output
    assert "seed: 3" in done.output and "train_batch_size: 9" in done.output


SFT = "torchrun --nproc-per-node=8 -m verl.trainer.sft_trainer model.path=/m data.train_files=/t.parquet"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", {"model.path": "/m", "train_files": ["/t.parquet"], "batch_rows": 256, "max_length": 1024}),
        ("trainer.total_training_steps=9", {"steps": 9}),
        ("data.max_token_len_per_gpu=4096", {"max_tokens_per_pack": 4096}),
        ("data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", {"max_tokens_per_pack": 2048}),
        ("optim.lr=1e-5 optim.lr_scheduler_type=cosine engine=megatron engine.tensor_model_parallel_size=2",
         {"optim.lr": 1e-5, "optim.lr_scheduler_type": "cosine"}),
        ("trainer.default_local_dir=/out trainer.save_freq=after_each_epoch", {"output_dir": "/out"}),
        ("model.lora_rank=32 model.lora_alpha=16", {"model.lora_rank": 32, "model.lora_alpha": 16}),
    ],
)  # fmt: skip
def test_fine_tuning_becomes_a_recipe_of_sft(given: str, says: dict[str, object]) -> None:
    made = of(f"{SFT} {given}")
    assert {key: made.get(key) for key in says} == says


def test_epochs_become_steps_where_the_rows_can_be_counted(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"prompt": ["a"] * 70, "response": ["b"] * 70}), file)
    line = (
        f"-m verl.trainer.sft_trainer model.path=m data.train_files={file} data.train_batch_size=32"
    )
    assert of(f"{line} trainer.total_epochs=3")["steps"] == 6
    assert of(line.replace(str(file), "/gone.parquet")).get("steps") is None


@pytest.mark.parametrize(
    ("entry", "tool"),
    [
        ({"class_name": "verl.tools.search_tool.SearchTool",
          "config": {"type": "native", "retrieval_service_url": "http://h/retrieve", "topk": 5, "timeout": 30}},
         {"search": {"url": "http://h/retrieve", "top_k": 5}, "timeout_s": 30.0}),
        ({"class_name": "recipe.retool.retool.CustomSandboxFusionTool",
          "config": {"type": "native", "default_timeout": 20},
          "tool_schema": {"function": {"name": "code_interpreter"}}},
         {"python": {}, "name": "code_interpreter", "timeout_s": 20.0}),
    ],
)  # fmt: skip
def test_a_file_of_tools_becomes_tools(
    entry: dict[str, object], tool: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    at = "actor_rollout_ref.rollout.multi_turn"
    line = (
        f"-m verl.trainer.main_ppo {at}.enable=True {at}.format=hermes {at}.max_assistant_turns=4"
    )
    made = of(f"{line} {at}.tool_config_path={file}")
    assert made["rollout.program"] == "tools"
    assert made["rollout.program_options.tools"] == [tool]
    assert made["rollout.program_options.max_turns"] == 4


def test_tools_of_an_mcp_server_keep_their_address_and_selection(tmp_path: Path) -> None:
    servers, file = tmp_path / "mcp.json", tmp_path / "tools.yaml"
    servers.write_text(
        json.dumps({"mcpServers": {"s": {"url": "http://h/mcp", "auth_token": "t"}}})
    )
    mcp = {"mcp_servers_config_path": str(servers), "tool_selected_list": ["find"]}
    file.write_text(
        yaml.safe_dump({"tools": [{"class_name": "X", "config": {"type": "mcp"}, "mcp": mcp}]})
    )
    made = of(f"-m verl.trainer.main_ppo data.tool_config_path={file}")
    assert made["rollout.program_options.tools"] == [
        {"url": "http://h/mcp", "headers": {"Authorization": "Bearer t"}, "only": ["find"]}
    ]


def test_a_tool_that_only_verl_can_run_is_refused_with_the_file_and_the_class(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [{"class_name": "a.Gsm8kTool", "config": {}}]}))
    made = migrate([f"data.tool_config_path={file}"])
    assert made.findings[0].status is KeyStatus.REFUSED
    assert str(file) in made.findings[0].note and "Gsm8kTool" in made.findings[0].note


def test_an_npu_refuses_its_key_and_not_the_script() -> None:
    made = migrate(["trainer.device=npu", "data.seed=3"])
    assert {found.key: found.status for found in made.findings} == {
        "trainer.device": KeyStatus.REFUSED,
        "data.seed": KeyStatus.MAPPED,
    }


def test_what_is_said_of_a_key_is_true() -> None:
    at = "actor_rollout_ref.rollout"
    sglang = migrate([f"{at}.name=sglang"])
    assert sglang.tree["rollout"]["name"] == "sglang" and not sglang.findings[0].note
    on = migrate([f"{at}.multi_turn.enable=True", f"{at}.multi_turn.max_assistant_turns=2"])
    assert not any("is off" in found.note for found in on.findings)
    assert all(found.status is KeyStatus.REFUSED for found in on.findings)
    gpus = migrate(["rollout.nnodes=1", "rollout.n_gpus_per_node=8"])
    assert not any("did you mean" in found.note for found in gpus.findings)


TEXTS = [
    *("true", "1", "1e-6", "no", "1:30", "null", "", "~", "<<", "=", "2020-01-01", "0x10", "1_0"),
    *("a: b", "a, b", "[a", "{a", "# a", "a # b", "- a", "? a", "*a", "&a", "!a", "|", "%a", "---", "..."),
    *("a\nstages: {x: {kind: evil.stage}}", "\n# b", "a\r\nb", "a\x85b", "a\u2028b", "'a'", '"a"', "\\", "\ta "),
    *("\x1b[2J", "\x9b31m", "\x7f", "\u202ea", "\ufeffa", "é", "\U0001f600\n"),
]  # fmt: skip
"""Hostile names of keys and values."""


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_read_back_as_itself_as_a_key_and_as_a_value(
    text: str, tmp_path: Path
) -> None:
    value = {text: {text: text, "list": [text, {text: [text, 1, True, None, 1e-6]}]}}
    shown = in_yaml(value)
    assert shown.isprintable()
    path = tmp_path / "a.yaml"
    for document in (f"a:\n- {shown}  # b", f"a: [{shown}]", recipe_yaml({"a": [value]})):
        assert yaml.safe_load(document) == {"a": [value]}
        path.write_text(document)
        assert read_yaml(path)[0] == {"a": [value]}


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_of_a_dictionary_and_its_value_become_nothing_else(text: str, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    given: dict[str, Any] = {"path": "/r.py", "reward_kwargs": {text: text, "b": [text]}}
    file.write_text(recipe_yaml({"custom_reward_function": given}))
    if not text or "." in text:  # a dot makes a key of a key
        return
    made = migrate((), [file])
    path = tmp_path / "made.yaml"
    path.write_text(recipe_text(made))
    tree = read_yaml(path)[0]
    assert tree == made.tree and "stages" not in tree
    assert tree["reward"]["custom_reward_function"]["reward_kwargs"] == {text: text, "b": [text]}


@pytest.mark.parametrize("text", TEXTS)
def test_a_comment_and_a_line_of_the_report_stay_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(recipe_yaml({"nonsense": {f"k{text}": text}, f"x{text}": 1}))
    made = migrate((), [file])
    shown = recipe_text(made)
    assert all(line.isprintable() for line in shown.split("\n"))
    path = tmp_path / "made.yaml"
    path.write_text(shown)
    assert read_yaml(path)[0] == made.tree
    assert shown.count("# REFUSED") == 2
    done = CliRunner().invoke(config, ["from-verl", "--yaml", str(file)])
    lines = done.stderr.split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == len([*report(made), "after the last"])


SECRET = {"HF_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret", "HOME": "/h", "USER": "me", "PATH": "/p"}


def test_a_script_sees_a_bare_environment_and_what_is_passed() -> None:
    assert scripts.seen(SECRET, ()) == {"HOME": "/h", "USER": "me"}
    assert scripts.seen(SECRET, ("HF_TOKEN", "N=a=b", "HOME=/x")) == {
        "HOME": "/x", "USER": "me", "HF_TOKEN": "s3cret", "N": "a=b",
    }  # fmt: skip
    with pytest.raises(UserError, match="--env MODEL: it is not set; set it, or give --env MODEL="):
        scripts.seen(SECRET, ("MODEL",))


def test_no_token_reaches_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def launched(script: str, environment: Mapping[str, str], *_: object) -> list[list[str]]:
        given.update(environment)
        return [["python3", "-m", "verl.trainer.main_ppo", "a=1"]]

    monkeypatch.setattr(scripts, "no_bubblewrap", lambda: None)
    monkeypatch.setattr(scripts, "launched", launched)
    script = "python3 -m verl.trainer.main_ppo trainer.experiment_name=${HF_TOKEN:-none}"
    done = CliRunner().invoke(config, ["from-verl", "--script", "-"], input=script, env=SECRET)
    assert done.exit_code == 0 and "s3cret" not in done.output
    assert given and "HF_TOKEN" not in given
    passed = ["from-verl", "--env", "HF_TOKEN", "--script", "-"]
    CliRunner().invoke(config, passed, input=script, env=SECRET)
    assert "s3cret" in given.values()


def test_an_interpolation_sees_no_more_than_the_script(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("trainer: {experiment_name: '${oc.env:HF_TOKEN,none}'}")
    arguments = ["from-verl", "--yaml", str(file)]
    done = CliRunner().invoke(config, arguments, env=SECRET)
    assert done.exit_code == 0 and "s3cret" not in done.output and "name: none" in done.output
    file.write_text("trainer: {experiment_name: '${oc.env:HF_TOKEN}'}")
    done = CliRunner().invoke(config, arguments, env=SECRET)
    assert isinstance(done.exception, ConfigError)
    assert "experiment_name: HF_TOKEN is not given; give it with --env" in str(done.exception)
    done = CliRunner().invoke(config, [*arguments, "--env", "HF_TOKEN=run"], env=SECRET)
    assert done.exit_code == 0 and "name: run" in done.output


def test_variables_of_overrides_that_nobody_sets_are_named_all_at_once() -> None:
    script = """
    # data.seed=$COMMENT
    BASE=${BASE:-/data}
    read -r ROWS
    for n in 1 2; do echo $ANYTHING; done
    python3 -m verl.trainer.main_ppo data.train_files="['$DATA_DIR/a', '$BASE/b']" critic.model.path=${RM_PATH} \\
      data.seed=$n data.train_batch_size=$ROWS trainer.experiment_name='$QUOTED' trainer.project_name=${A:-b}
    """
    with pytest.raises(ConfigError) as caught:
        started(script, {"HOME": "/h"})
    assert str(caught.value) == (
        "overrides of the script have $DATA_DIR, $RM_PATH, which it does not set; give each with --env NAME=VALUE"
    )
