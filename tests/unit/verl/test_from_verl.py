"""A verl run, as it is pasted, becomes a recipe that says the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshrl.cli.commands.config import config
from meshrl.config import Recipe, load_recipe
from meshrl.contract.errors import ConfigError, UserError
from meshrl.sandbox.sandbox import no_bubblewrap
from meshrl.verl import migrate
from meshrl.verl.migrate import Migration
from meshrl.verl.programs import command_of
from meshrl.verl.rules import KeyStatus
from meshrl.verl.table import rules
from meshrl.verl.written import recipe_text

from . import verl_commands
from .verl_commands import command_words

A, R, F, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
SGLANG = f"{R}.name=sglang"
DYNAMIC = f"{A}.use_dynamic_bsz=True"
TOKENS = "data.max_prompt_length=100 data.max_response_length=200"


def recipe_of(made: Migration, tmp_path: Path) -> Recipe:
    path = tmp_path / "made.yaml"
    path.write_text(recipe_text(made))
    return load_recipe(path, check=False)


def at(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for word in key.split("."):
        if isinstance(found, list):
            found = found[int(word)]
        else:
            found = found[word] if isinstance(found, dict) else getattr(found, word)
    return found


MOST_WRITTEN = Path(__file__).with_name("most_written.txt").read_text().splitlines()
"""Keys that users write most: the override (and those it depends on), and the values of the recipe then."""


def plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("line", MOST_WRITTEN, ids=lambda line: line[:60])
def test_the_keys_that_users_write_most_all_map(line: str, tmp_path: Path) -> None:
    written, _, said = line.partition(" => ")
    made = migrate(command_words(written, {}))
    assert {found.status for found in made.findings} == {KeyStatus.MAPPED}, made.findings
    recipe, says = recipe_of(made, tmp_path), json.loads(said)
    assert {key: plain(at(recipe, key)) for key in says} == says


def test_a_grpo_command_says_the_same_here(tmp_path: Path) -> None:
    made = migrate(command_words(verl_commands.GRPO, {"HOME": "/h"}))
    assert {found.status for found in made.findings} == {KeyStatus.MAPPED}
    recipe = recipe_of(made, tmp_path)
    assert (recipe.data.train_batch_size, recipe.rollout.n, recipe.actor.ppo_mini_batch_size) == (
        1024,
        5,
        256,
    )
    assert (
        recipe.actor.ppo_max_token_len_per_gpu == recipe.reference.max_tokens_per_batch == 40 * 1536
    )
    assert recipe.data.train_files == [Path("/h/data/gsm8k/train.parquet")]
    assert (recipe.run.name, recipe.trainer.nproc) == ("qwen_grpo", 8)
    assert recipe.rollout.engine["extra_args"] == [
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.6",
    ]


def test_a_ppo_command_says_the_same_here(tmp_path: Path) -> None:
    made = migrate(command_words(verl_commands.PPO, {"HOME": "/h"}))
    assert {found.status for found in made.findings} == {KeyStatus.MAPPED}
    recipe = recipe_of(made, tmp_path)
    assert (recipe.algorithm.adv_estimator, recipe.critic.optim.lr, recipe.rollout.n) == (
        "gae",
        1e-5,
        1,
    )
    assert recipe.critic.path == Path("/h/models/qwen")
    assert recipe.trainer.val_before_train is False and recipe.trainer.logger == ("console",)


def test_a_dapo_script_says_the_same_here(tmp_path: Path) -> None:
    made = migrate(command_words(verl_commands.DAPO, {"HOME": "/h"}))
    assert not made.of(KeyStatus.REFUSED)
    recipe = recipe_of(made, tmp_path)
    judged, overlong = recipe.algorithm.filter_groups, recipe.algorithm.overlong_buffer
    assert (judged.enable, judged.metric, judged.max_num_gen_batches, judged.oversample) == (
        True,
        "acc",
        10,
        3.0,
    )
    assert (overlong.enable, overlong.len, overlong.penalty_factor) == (True, 4096, 1.0)
    actor = recipe.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10)
    assert actor.ppo_max_token_len_per_gpu == 8 * 22528
    assert (actor.optim.lr_warmup_steps, actor.optim.weight_decay) == (10, 0.1)
    assert (recipe.rollout.val_kwargs.temperature, recipe.rollout.top_k) == (1.0, -1)


def test_what_is_not_given_is_verls_default_and_its_conventions(tmp_path: Path) -> None:
    recipe = recipe_of(migrate([]), tmp_path)
    assert (recipe.algorithm.adv_estimator, recipe.rollout.n) == ("gae", 1)
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (1024, 256)
    assert recipe.data.filter_overlong_prompts is False
    assert recipe.trainer.total_epochs == 30
    assert recipe.model.enable_gradient_checkpointing and recipe.model.param_dtype == "bfloat16"
    assert recipe.algorithm.conventions == "verl"
    assert recipe.queue.max_staleness == 0


def test_a_clip_ratio_alone_moves_nothing_as_in_verl(tmp_path: Path) -> None:
    made = migrate([f"{A}.clip_ratio=0.4"])
    recipe = recipe_of(made, tmp_path)
    assert (recipe.actor.clip_ratio_low, recipe.actor.clip_ratio_high) == (0.2, 0.2)
    assert "does not read it" in made.findings[0].note
    freed = migrate(
        [f"{A}.clip_ratio=0.4", f"{A}.clip_ratio_low=null", f"{A}.clip_ratio_high=null"]
    )
    assert recipe_of(freed, tmp_path).actor.clip_ratio_low is None


def test_rows_of_a_pass_become_tokens_and_a_pass_holds_at_least_one_row(tmp_path: Path) -> None:
    lengths = ["data.max_prompt_length=4096", "data.max_response_length=28672"]
    recipe = recipe_of(migrate([*lengths, f"{A}.ppo_micro_batch_size_per_gpu=2"]), tmp_path)
    assert recipe.actor.ppo_max_token_len_per_gpu == 2 * 32768
    assert recipe_of(migrate(lengths), tmp_path).actor.ppo_max_token_len_per_gpu == 32768
    dynamic = [
        *lengths,
        DYNAMIC,
        f"{A}.ppo_max_token_len_per_gpu=16384",
        f"{A}.ulysses_sequence_parallel_size=4",
    ]
    assert recipe_of(migrate(dynamic), tmp_path).actor.ppo_max_token_len_per_gpu == 65536


def test_a_share_of_warm_up_becomes_steps_or_asks_for_them(tmp_path: Path) -> None:
    share = f"{A}.optim.lr_warmup_steps_ratio=0.1"
    made = migrate([share, "trainer.total_training_steps=55"])
    assert recipe_of(made, tmp_path).actor.optim.lr_warmup_steps == 5
    (refused,) = migrate([share]).of(KeyStatus.REFUSED)
    assert "set actor.optim.lr_warmup_steps" in refused.note


def test_a_learned_reward_model_becomes_a_judge(tmp_path: Path) -> None:
    made = migrate(["reward.reward_model.enable=True", "reward.reward_model.model_path=/rm"])
    (judge,) = recipe_of(made, tmp_path).reward.judges
    assert (judge.kind, judge.options) == ("model", {"path": "/rm"})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("data.max_respnse_length=8", "did you mean 'data.max_response_length'"),
        ("algorithm.gama=1", "did you mean 'algorithm.gamma'"),
        ("algorithm.adv_estimator=mine", "there is no 'mine' here"),
        (f"{R}.multi_turn.enable=True", "rollout.program"),
        ("trainer.resume_mode=/old/global_step_5", "set model.path"),
        ("reward.reward_manager.name=remote", "compute_score"),
        ("reward.reward_model.enable=True", "it needs a path"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(written: str, said: str) -> None:
    (refused,) = migrate([written]).of(KeyStatus.REFUSED)
    assert said in refused.note


LOSS, TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"
TEACHER = f"{TEACHERS}.teacher_model"
TOP = f"{LOSS}.loss_mode=forward_kl_topk"
ON_POLICY = f"{LOSS}.loss_mode=k1 {LOSS}.use_policy_gradient=True"


def test_a_teacher_becomes_the_reference(tmp_path: Path) -> None:
    words = (
        f"distillation.enabled=True {ON_POLICY} {TEACHER}.model_path=/t {LOSS}.use_task_rewards=False"
        f" {LOSS}.distillation_loss_coef=0.5 distillation.nnodes=1 {TEACHER}.inference.name=vllm"
    )
    made = migrate(words.split())
    assert not made.of(KeyStatus.REFUSED)
    recipe = recipe_of(made, tmp_path)
    assert str(recipe.reference.path) == "/t"
    # verl reads the coefficient beside rewards only.
    assert recipe.algorithm.distillation.weight == 1
    assert recipe.algorithm.distillation.reward_weight == 0
    beside = migrate([word for word in words.split() if "task_rewards" not in word])
    assert recipe_of(beside, tmp_path).algorithm.distillation.weight == 0.5


def test_a_teacher_may_have_any_name_and_verls_own_entry_is_dropped_beside_it(
    tmp_path: Path,
) -> None:
    made = migrate(
        f"distillation.enabled=True {ON_POLICY} {TEACHER}.model_path=/none +{TEACHERS}.math.model_path=/t"
        f" +{TEACHERS}.math.key=openai/gsm8k +{TEACHERS}.math.inference.max_model_len=2048".split()
    )
    assert not made.of(KeyStatus.REFUSED)
    assert str(recipe_of(made, tmp_path).reference.path) == "/t"
    (refused,) = migrate([f"{TEACHERS}.math.colour=red", "distillation.enabled=True"]).of(
        KeyStatus.REFUSED
    )[1:]
    assert "no such key of a teacher" in refused.note


def test_a_model_of_the_hub_is_no_directory_that_is_missing() -> None:
    made = migrate([f"{M}.path=Qwen/Qwen2.5-0.5B"])
    (found,) = [each for each in made.findings if each.key == f"{M}.path"]
    assert "of the Hugging Face hub, downloaded" in found.note
    assert not [said for said in made.to_do if "model.path" in said]
    assert [said for said in migrate([f"{M}.path=/none/there"]).to_do if "model.path" in said]


def test_a_type_of_the_weights_is_the_type_of_the_products(tmp_path: Path) -> None:
    at = "actor_rollout_ref.actor.fsdp_config"
    for written, compute in (
        ("model_dtype=bf16", "bfloat16"),
        ("model_dtype=fp32", "bfloat16"),  # verl's compute type by default
        ("mixed_precision.param_dtype=fp32", "float32"),
    ):
        made = migrate([f"{at}.{written}"])
        assert not made.of(KeyStatus.REFUSED)
        assert recipe_of(made, tmp_path).model.param_dtype == compute
    both = migrate([f"{at}.model_dtype=bfloat16", f"{at}.dtype=float32"])
    assert recipe_of(both, tmp_path).model.param_dtype == "float32"
    for written in ("model_dtype=fp16", "mixed_precision.reduce_dtype=bf16"):
        assert migrate([f"{at}.{written}"]).of(KeyStatus.REFUSED)


@pytest.mark.parametrize(
    "written",
    [
        "data.tokenizer=/another",
        "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
        "actor_rollout_ref.actor.optim.override_optimizer_config={amsgrad: true}",
        "actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.fsdp_plan.reduce_dtype=bf16",
        "trainer.v1.sampler.sampler_kwargs={a: 1}",
    ],
)
def test_what_would_change_numbers_is_refused_and_not_ignored(written: str) -> None:
    (refused,) = migrate([written]).of(KeyStatus.REFUSED)
    assert refused.note


def test_a_rate_falls_until_the_step_that_is_named_and_warms_up_for_a_share_of_it(
    tmp_path: Path,
) -> None:
    at = "actor_rollout_ref.actor.optim"
    made = migrate(
        [
            f"{at}.lr_decay_steps=200",
            f"{at}.lr_warmup_steps_ratio=0.1",
            f"{at}.lr_decay_style=cosine",
        ]
    )
    assert not made.of(KeyStatus.REFUSED)
    optim = recipe_of(made, tmp_path).actor.optim
    assert (optim.lr_decay_steps, optim.lr_warmup_steps) == (200, 20)
    started = migrate([f"{at}.lr_warmup_init=1e-7", f"{at}.lr=1e-6"])
    assert recipe_of(started, tmp_path).actor.optim.lr_warmup_init_ratio == pytest.approx(0.1)


def test_an_engine_brings_its_schedule_where_the_command_gives_none(tmp_path: Path) -> None:
    at = "actor_rollout_ref.actor.optim"
    for words, kind in (
        (["model_engine=megatron"], "constant"),
        (["model_engine=veomni"], "cosine"),
        (["model_engine=torchtitan"], "linear"),
        (["model_engine=veomni", f"{at}.lr_scheduler_type=constant"], "constant"),
    ):
        assert recipe_of(migrate(words), tmp_path).actor.optim.lr_scheduler_type == kind


def test_positions_are_the_rows_business_unless_the_checkpoint_scales_them(tmp_path: Path) -> None:
    model, key = "actor_rollout_ref.model", "override_config.max_position_embeddings=32768"
    assert not migrate([f"{model}.path=/none", f"+{model}.{key}"]).of(KeyStatus.REFUSED)
    scaled = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(scaled))
    (refused,) = migrate([f"{model}.path={tmp_path}", f"+{model}.{key}"]).of(KeyStatus.REFUSED)
    assert "yarn" in refused.note


def test_old_names_of_rejection_and_of_a_bypass_are_read(tmp_path: Path) -> None:
    at = "algorithm.rollout_correction"
    made = migrate(
        f"{at}.rollout_rs=geometric {at}.rollout_rs_threshold=1.01"
        f" {at}.rollout_rs_threshold_lower=0.99".split()
    )
    found = recipe_of(made, tmp_path).algorithm.rollout_correction
    assert (found.rollout_rs, found.rollout_rs_threshold) == ("seq_mean_k1", "0.99_1.01")
    words = [f"{at}.rollout_is=token", f"{at}.bypass_mode=False", "data.train_batch_size=0"]
    program = command_of(["verl.experimental.fully_async_policy.fully_async_main"])
    again = recipe_of(migrate(words, started=program), tmp_path)
    assert again.actor.recompute_old_log_probs


def test_a_teacher_that_tells_its_likeliest_tokens_is_a_loss(tmp_path: Path) -> None:
    words = (
        f"distillation.enabled=True {TOP} {LOSS}.use_policy_gradient=False {TEACHER}.model_path=/t"
        f" {LOSS}.topk=64 {LOSS}.use_chunked_topk=True"
    )
    made = migrate(words.split())
    assert not made.of(KeyStatus.REFUSED)
    teaches = recipe_of(made, tmp_path).algorithm.distillation
    assert (teaches.top_k, teaches.weight) == (64, 1)
    # verl's null bounds nothing.
    assert (teaches.min_log_prob, teaches.max_log_ratio) == (None, 1e6)
    bounds = [f"{LOSS}.loss_max_clamp=10.0", f"{LOSS}.log_prob_min_clamp=-10.0"]
    bounded = migrate([word for word in words.split() if "topk=64" not in word] + bounds)
    teaches = recipe_of(bounded, tmp_path).algorithm.distillation
    assert (teaches.top_k, teaches.min_log_prob, teaches.max_log_ratio) == (32, -10, 10)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (f"{TOP} {TEACHER}.model_path=/t", "is a loss, use_policy_gradient=false"),
        (f"{LOSS}.use_policy_gradient=False {TEACHER}.model_path=/t", "another loss: actor.use_kl"),
        (f"{TEACHER}.model_path=/t", "an advantage is the log-prob itself"),
        (ON_POLICY, "of one teacher"),
        (f"{ON_POLICY} {TEACHERS}.a.model_path=/a {TEACHERS}.b.model_path=/b", "not a, b: a run"),
        (f"{ON_POLICY} {TEACHERS}.a.key=math", "of one teacher: distillation.teacher_models.a."),
    ],
)
def test_another_distillation_is_refused_with_what_there_is(written: str, said: str) -> None:
    (refused,) = migrate(["distillation.enabled=True", *written.split()]).of(KeyStatus.REFUSED)
    assert said in refused.note


def test_the_trainers_machines_are_the_trainers_and_engines_have_their_own() -> None:
    report = migrate(["trainer.nnodes=2"])
    (said,) = report.of(KeyStatus.MAPPED)
    assert report.tree["trainer"]["nnodes"] == 2
    assert "meshrl slurm --nodes, or placement.machines" in said.note


def test_a_schedule_that_counts_from_0_is_a_step_behind() -> None:
    said = {}
    for value in ("True", "False"):
        (found,) = migrate([f"{A}.optim.zero_indexed_step={value}"]).of(KeyStatus.MAPPED)
        said[value] = found.note
    assert "a step ahead of verl's" in said["True"] and "as here" in said["False"]


def test_variables_of_the_chat_template_go_along() -> None:
    words = [
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "+data.apply_chat_template_kwargs.custom_key=x",
    ]
    report = migrate(words)
    assert len(report.of(KeyStatus.MAPPED)) == 2
    variables = report.tree["data"]["apply_chat_template_kwargs"]
    assert variables == {"enable_thinking": False, "custom_key": "x"}


def test_what_has_no_meaning_here_is_ignored_with_a_reason() -> None:
    words = [
        f"{R}.free_cache_engine=True",
        f"{M}.use_liger=True",
        "ray_kwargs.ray_init.num_cpus=4",
    ]
    ignored = migrate(words).of(KeyStatus.IGNORED)
    assert len(ignored) == 3 and all(found.note for found in ignored)


@pytest.mark.parametrize(
    "written",
    [
        f"{M}.mtp.enable=True",
        "data.video_key=videos",
        "actor_rollout_ref.actor.freeze_layers=4",
        "actor_rollout_ref.actor.router_replay.mode=R2",
        "critic.megatron.router_replay.mode=R3",
        f"{R}.presence_penalty=1.1",
        f"{R}.min_p=0.05",
        f"{R}.quantization=mxfp4",
        f"{R}.val_kwargs.max_tokens=64",
        "critic.model.freeze=embeddings",
        "actor_rollout_ref.ref.update_every=10",
        "trainer.ref_update_freq=100",
        "skip.rollout=true",
    ],
)
def test_a_key_that_the_table_does_not_name_is_refused_not_ignored(written: str) -> None:
    migration = migrate([written])
    assert [found.key for found in migration.of(KeyStatus.REFUSED)] == [written.partition("=")[0]]
    assert not migration.of(KeyStatus.IGNORED)


@pytest.mark.parametrize(
    "section",
    [
        A,
        R,
        F,
        M,
        f"{A}.optim",
        f"{A}.fsdp_config",
        "data",
        "algorithm",
        "critic",
        "critic.optim",
        "reward",
        "reward_model",
        "trainer",
        "async_training",
        "skip",
    ],
)
def test_a_key_of_nobody_is_refused_in_every_section_that_may_change_training(section: str) -> None:
    (refused,) = migrate([f"{section}.zzz_unheard_of=4"]).of(KeyStatus.REFUSED)
    assert "known here" in refused.note


def test_turns_of_a_conversation_are_refused_with_the_switch_and_ignored_without() -> None:
    turns = f"{R}.multi_turn.max_assistant_turns=4"
    assert not migrate([turns]).of(KeyStatus.REFUSED)
    refused = migrate([f"{R}.multi_turn.enable=True", turns]).of(KeyStatus.REFUSED)
    assert len(refused) == 2


def test_lora_in_its_nested_spelling_is_lora() -> None:
    made = migrate([f"{M}.lora.rank=16", f"{M}.lora.alpha=32"])
    assert (made.tree["model"]["lora_rank"], made.tree["model"]["lora_alpha"]) == (16, 32)


def test_plus_and_tilde_add_and_take_out(tmp_path: Path) -> None:
    at_buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    made = migrate(
        [
            "reward.reward_manager.name=dapo",
            f"+{at_buffer}.enable=True",
            f"++{at_buffer}.len=64",
            f"+{at_buffer}.penalty_factor=0.5",
            "+reward.custom_reward_function.reward_kwargs.depth.most=3",
            "data.train_batch_size=64",
            "~data.train_batch_size",
        ]
    )
    recipe = recipe_of(made, tmp_path)
    overlong = recipe.algorithm.overlong_buffer
    assert (overlong.enable, overlong.len, overlong.penalty_factor) == (True, 64, 0.5)
    assert recipe.reward.custom_reward_function.reward_kwargs == {"depth": {"most": 3}}
    assert recipe.data.train_batch_size == 1024


def test_yaml_is_read_with_its_defaults_list_and_interpolations_and_overrides_win(
    tmp_path: Path,
) -> None:
    (tmp_path / "verl.yaml").write_text(
        """
defaults: [{actor@actor_rollout_ref.actor: dp_actor}, _self_]
hydra: {searchpath: [file://x]}
data: {max_prompt_length: 64, max_response_length: 128, train_files: '${data.root}/t.parquet', root: /d}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 32, kl_loss_coef: '${oc.select:actor_rollout_ref.x,0.5}', use_kl_loss: '${y.z}'}
  rollout: {n: 4, name: vllm, prompt_length: '${data.max_prompt_length}'}
trainer: {experiment_name: e, default_local_dir: 'ckpt/${trainer.experiment_name}'}
"""
    )
    recipe = recipe_of(migrate([f"{R}.n=6"], [tmp_path / "verl.yaml"]), tmp_path)
    assert recipe.data.train_files == [Path("/d/t.parquet")]
    assert (recipe.actor.kl_loss_coef, recipe.actor.use_kl_loss) == (0.5, False)
    assert (recipe.rollout.n, recipe.actor.ppo_mini_batch_size) == (6, 32)
    assert recipe.trainer.default_local_dir == Path("ckpt/e")


def test_a_value_that_no_recipe_holds_is_named_as_it_was_written() -> None:
    with pytest.raises(
        ConfigError, match=r"command line: data\.truncation=up: data\.truncation: got 'up'"
    ):
        migrate(["data.truncation=up"])
    with pytest.raises(ConfigError, match=r"'1,2'|a sweep"):
        migrate([f"{A}.optim.lr=1e-6,1e-5"])


def test_every_rule_leads_to_a_key_that_there_is() -> None:
    made = migrate([])  # the defaults of all rules at once; a wrong target would not load
    assert made.tree
    keys = [found.key for found in rules()]
    assert len(keys) == len(set(keys)), "a key with two rules: the second is never reached"


def invoke(*arguments: str, text: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(config, ["from-verl", *arguments], input=text)
    return done.exit_code, done.stdout, done.stderr


def test_the_command_writes_a_recipe_and_says_what_became_of_every_key(tmp_path: Path) -> None:
    out = tmp_path / "my-run.yaml"
    command = ["python3", "-m", "verl.trainer.main_ppo", f"{R}.n=3", "nonsense.key=1"]
    code, said, _ = invoke("-o", str(out), "--", *command)
    assert code == 0 and "mapped (2)" in said and "refused" in said and f"meshrl up {out}" in said
    recipe = load_recipe(out, check=False)
    assert (recipe.run.name, recipe.rollout.n) == ("my-run", 3)
    assert "# REFUSED nonsense.key=1" in out.read_text()


@pytest.mark.parametrize("words", [["-"], ["python3", "-m", "verl.trainer.main_ppo"]])
def test_a_command_that_names_no_key_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"names no key of verl's: want its command after --, or"):
        CliRunner().invoke(config, ["from-verl", "--", *words], catch_exceptions=False)


def test_strict_writes_nothing_when_a_key_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "my.yaml"
    code, _, said = invoke(
        "--strict", "-o", str(out), "--", "verl.trainer.main_ppo", "nonsense.key=1"
    )
    assert code == 2 and "nothing was written" in said and not out.exists()


@pytest.mark.skipif(no_bubblewrap() is not None, reason=f"{no_bubblewrap()}")
def test_a_script_comes_from_stdin_and_the_report_is_json_for_programs() -> None:
    script = f"N=2\npython3 -m verl.trainer.main_ppo \\\n  {R}.n=$N \\\n  trainer.total_epochs=4\n"
    code, recipe, output = invoke("--script", "-", "--json", text=script)
    assert code == 0 and "n: 2" in recipe
    found = {one["key"]: one for one in json.loads(output)["keys"]}
    assert found[f"{R}.n"]["settings"] == {"rollout.n": 2}


def finding(made: Migration, key: str) -> Any:
    (found,) = (each for each in made.findings if each.key == key)
    return found


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("zai-org/GLM-4.1V-9B-Thinking", "glm4v reads pictures, in another way"),
        ("openbmb/MiniCPM-o-2_6", "minicpmo reads pictures, in another way"),
        ("OpenGVLab/InternVL3-8B", "internvl reads pictures, in another way"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32 has layers of other kinds than attention"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4: its decoder layers are not under a known"),
        ("Qwen/Qwen3.5-35B-A3B", ""),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", ""),
        ("Qwen/Qwen2.5-VL-7B-Instruct", ""),
        ("deepseek-ai/DeepSeek-V3", ""),
        ("google/gemma-3-1b-it", ""),
    ],
)
def test_a_model_of_the_hub_that_cannot_be_trained_is_among_the_refusals(
    name: str, why: str
) -> None:
    found = finding(migrate([f"{M}.path={name}"]), f"{M}.path")
    assert found.settings == {"model.path": name}
    assert found.status is (KeyStatus.REFUSED if why else KeyStatus.MAPPED)
    assert why in found.note and "\n" not in found.note


def test_a_directory_of_such_a_model_is_told_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    found = finding(migrate([f"{M}.path={tmp_path}"]), f"{M}.path")
    assert found.status is KeyStatus.REFUSED and "jamba has layers of other kinds" in found.note


def test_a_bound_of_null_is_none(tmp_path: Path) -> None:
    mode, bound = (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.sampler.max_off_policy_threshold",
    )
    for given, said in (([], 8), ([f"{bound}=3"], 3), ([f"{bound}=null"], "inf")):
        made = migrate([mode, *given])
        assert recipe_of(made, tmp_path).queue.max_staleness == said
    assert finding(made, "trainer.v1.trainer_mode").note == "asynchronous, any number of steps off"


def test_what_a_mesh_does_always_is_mapped_and_a_loop_with_tools_is_not_switched_off(
    tmp_path: Path,
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(
        "tools: [{class_name: SearchTool, config: {retrieval_service_url: 'http://127.0.0.1:1'}}]"
    )
    loop = f"{R}.agent.default_agent_loop"
    named = [f"{R}.multi_turn.tool_config_path={tools}", f"{R}.multi_turn.max_assistant_turns=3"]
    tolerance = "async_training.fault_tolerance.enable"
    made = migrate([f"{loop}=tool_agent", f"{tolerance}=True", *named])
    assert "always on" in finding(made, tolerance).note
    assert finding(made, tolerance).status is KeyStatus.MAPPED
    assert finding(made, loop).note != "switched off"
    assert at(recipe_of(made, tmp_path), "rollout.program") == "tools"
    assert at(recipe_of(made, tmp_path), "rollout.program_options.max_turns") == 3
    alone = finding(migrate([f"{loop}=tool_agent"]), loop)
    assert (alone.status, alone.note) == (KeyStatus.MAPPED, "multi_turn names no tools: one turn")
    assert finding(migrate([f"{loop}=my_agent"]), loop).status is KeyStatus.REFUSED


def test_modules_that_verl_would_import_are_reported() -> None:
    words = ["VERL_USE_EXTERNAL_MODULES=my.models", "python3", "-m", "verl.trainer.main_ppo"]
    said = CliRunner().invoke(config, ["from-verl", "--", *words, "data.train_batch_size=8"])
    (line,) = [line for line in said.output.splitlines() if line.startswith("# REFUSED")]
    assert line.startswith("# REFUSED VERL_USE_EXTERNAL_MODULES=") and "my.models" in line


def test_nothing_is_refused_as_a_whole_where_optional_packages_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"PAR1")
    for name in ("msgpack", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in [name for name in sys.modules if name.startswith("meshrl.rollout.engines.vllm")]:
        monkeypatch.delitem(sys.modules, module)
    for program in ("main_ppo", "sft_trainer"):
        words = ["python3", "-m", f"verl.trainer.{program}", f"data.train_files={file}"]
        more = [f"{R}.name=vllm"] if program == "main_ppo" else ["trainer.total_epochs=2"]
        said = CliRunner().invoke(config, ["from-verl", "--", *words, *more])
        assert said.exit_code == 0 and said.exception is None, said.output


def test_a_folder_of_a_command_is_no_program_of_verl() -> None:
    trained = "verl.trainer.main_ppo"
    words = f"ray job submit --working-dir /home/user/main -- python3 -m {trained} data.seed=1"
    command = command_of(words.split())
    assert command is not None
    assert (command.name, command.arguments) == (trained, ("data.seed=1",))
    script = command_of(["python3", "recipe/dapo/main_dapo.py", "data.seed=1"])
    assert script is not None and script.arguments == ("data.seed=1",)
