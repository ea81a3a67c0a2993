"""Sixty wrong recipes, each with the line that it gets before anything starts; nothing is imported that computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.config import load_recipe
from meshrl.config.loading import Written
from meshrl.config.machine import AssumedMachine, Assumptions, ThisMachine
from meshrl.contract.errors import ConfigError

from ...small_checkpoint import write_tokenizer, write_weights

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * (solution_str == ground_truth)

def too_few(solution_str, ground_truth):
    return 0.0
"""
QWEN = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 2048}
MIXTURE = {**QWEN, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
MIXTURE |= {"num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
PACKAGES = ("torch", "transformers", "peft", "sympy", "math-verify", "latex2sympy2_extended")


def rows(*values: dict[str, object]) -> list[dict[str, object]]:
    return list(values)


MACHINE = {
    "gpus": 2,
    "packages": {
        **dict.fromkeys(PACKAGES, True),
        **dict.fromkeys(
            ("vllm", "sglang", "cupy", "redis", "wandb", "tensorboard", "reasoning_gym"), False
        ),
    },
    "programs": {
        "/venv/bin/python": True,
        "/gone/python": False,
        "serve-it": False,
        "bwrap": False,
    },
    "models": {
        "model": QWEN,
        "gemma": {"architectures": ["Gemma2ForCausalLM"]},
        "deepseek": {"architectures": ["DeepseekV3ForCausalLM"]},
        "heads": {**QWEN, **HEADS},
        "odd": {**QWEN, **HEADS, "num_key_value_heads": 4, "intermediate_size": 90},
        "chunked": {**QWEN, "layer_types": ["full_attention", "chunked_attention"]},
        "hybrid": {**QWEN, "text_config": {"layer_types": ["linear_attention"]}},
        "unlisted": {**QWEN, "text_config": {"model_type": "jamba"}},
        "kimi": {**QWEN, **HEADS, "model_type": "kimi_linear", "num_experts": 4},
        "stateful": {**QWEN, **HEADS, "model_type": "qwen3_next"},
        "bart": {**QWEN, "model_type": "bart"},
        "gelu": {**QWEN, "hidden_act": "gelu"},
        "dynamic": {**QWEN, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    },
    "rows": {
        "train.jsonl": rows({"prompt": "1+1?", "answer": "2"}),
        "question.jsonl": rows({"question": "1+1?", "answer": "2"}),
        "empty.jsonl": [],
        "unanswered.jsonl": rows({"prompt": "1+1?"}),
        "nothing.jsonl": rows({"prompt": "1+1?", "answer": " "}),
        "misspelt.jsonl": rows({"prompt": "1+1?", "answer": "2"}, {"prompt": "?", "anwser": "2"}),
        "image.jsonl": rows({"prompt": "<image>x", "images": ["x.png"], "answer": "2"}),
        "parts.jsonl": rows(
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"}
        ),
        "null.jsonl": rows({"prompt": [{"role": "user", "content": None}], "answer": "2"}),
        "called.jsonl": rows(
            {"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}], "answer": "2"}
        ),
        "verl.jsonl": rows({"prompt": "x", "reward_model": {"style": "rule"}}),
        "half.jsonl": rows({"prompt": "\ud83d", "answer": "2"}),
        "blank.jsonl": rows({"prompt": "", "answer": "2"}),
    },
    "files": {
        "reward.py": REWARD,
        "broken.py": "def compute_score(:\n    pass\n",
        "other.py": "def compute_scores():\n    pass\n",
    },
}
RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl], max_prompt_length: 512, max_response_length: 512}
reward: {functions: [{name: exact_match}]}
"""
OWN = "reward.custom_reward_function"
CORRECTION = "algorithm.rollout_correction"

WRONG: list[tuple[str, str]] = [
    # data
    (
        "data.train_files=[question.jsonl]",
        "data.train_files.0: question.jsonl:1: no 'prompt' (data.prompt_key); the row has question, answer: set"
        " data.prompt_key=question",
    ),
    (
        "data.prompt_key=question",
        "data.train_files.0: train.jsonl:1: no 'question' (data.prompt_key); the row has prompt, answer: set"
        " data.prompt_key=prompt",
    ),
    (
        "data.train_files=[empty.jsonl]",
        "data.train_files.0: no prompts in empty.jsonl: want rows with a prompt",
    ),
    (
        "data.train_files=[unanswered.jsonl]",
        "data.train_files.0: unanswered.jsonl:1: no 'answer'; the row has prompt; say where the answer is"
        " (data.answer_key), or that tasks have none (data.answer_required: false)",
    ),
    (
        "data.train_files=[nothing.jsonl]",
        "data.train_files.0: nothing.jsonl:1: no 'answer'; it is empty; say where the answer is (data.answer_key), or"
        " that tasks have none (data.answer_required: false)",
    ),
    (
        "data.train_files=[misspelt.jsonl]",
        "data.train_files.0: misspelt.jsonl:2: no 'answer'; the row has prompt, anwser: set data.answer_key=anwser;"
        " say where the answer is (data.answer_key), or that tasks have none (data.answer_required: false)",
    ),
    (
        "data.answer_key=solution",
        "data.train_files.0: train.jsonl:1: no 'solution'; the row has prompt, answer: set data.answer_key=answer;"
        " say where the answer is (data.answer_key), or that tasks have none (data.answer_required: false)",
    ),
    (
        "data.val_files=[image.jsonl]",
        "data.val_files.0: image.jsonl:1: 'images' cannot be used (model.path reads text only); leave the column out",
    ),
    (
        "data.train_files=[parts.jsonl]",
        "data.train_files.0: parts.jsonl:1: 'prompt.content' has a part of type 'image', want text",
    ),
    (
        "data.train_files=[null.jsonl]",
        "data.train_files.0: null.jsonl:1: 'prompt.content' is null, want text",
    ),
    (
        "data.train_files=[called.jsonl]",
        "data.train_files.0: called.jsonl:1: 'tool_calls' of a message in 'prompt' cannot be used, only role and"
        " content; leave it out",
    ),
    (
        "data.train_files=[verl.jsonl]",
        "data.train_files.0: verl.jsonl:1: reward_model is {'style': 'rule'}, want an object with ground_truth",
    ),
    (
        "data.train_files=[half.jsonl]",
        "data.train_files.0: half.jsonl:1: 'prompt' has '\\ud83d' at character 0, half of a character, want text",
    ),
    ("data.train_files=[blank.jsonl]", "data.train_files.0: blank.jsonl:1: the prompt is empty"),
    (
        "data.train_files=[trian.jsonl]",
        "data.train_files.0: no such file: trian.jsonl (did you mean train.jsonl?)",
    ),
    ("data.train_files=[model]", "data.train_files.0: model is a directory; want a file"),
    (
        "data.train_files=[]",
        "data.train_files is empty; want parquet or jsonl files, or data.reasoning_gym",
    ),
    (
        "data.apply_chat_template_kwargs={tokenize: true, enable_thinking: false}",
        "data.apply_chat_template_kwargs: tokenize: want variables of the chat template, as enable_thinking",
    ),
    ("algorithm.gamma=.inf", "algorithm.gamma: got inf, want a number"),
    ("actor.optim.lr=.nan", "actor.optim.lr: got nan, want "),
    (
        "data.few_shot=[{prompt: a sum}]",
        "data.few_shot.0.answer is missing; want text",
    ),
    (
        "data.reasoning_gym={tasks: {boxnet: {}}}",
        "data.reasoning_gym.tasks: rows of boxnet have no answer to score: leave it out",
    ),
    (
        "data.reasoning_gym={tasks: {gcd: {}}}",
        "data.reasoning_gym needs the package reasoning-gym, which is not installed",
    ),
    (
        "data.reasoning_gym={tasks: {gcd: {}}, curriculum: {}}",
        "data.reasoning_gym: curriculum needs levels: 2 or more",
    ),
    (
        "data.train_files=[reward.py]",
        "data.train_files.0: reward.py: want .csv, .json, .jsonl or .parquet, or name a reader of your own"
        " (data.reader)",
    ),
    (
        "data.weights={sums: 1}",
        "data.train_files.0: train.jsonl:1: data.weights has neither this file nor data_source '' (it has sums)",
    ),
    (
        "data.weights={trian.jsonl: 1}",
        "data.weights: trian.jsonl is none of data.train_files (train.jsonl)",
    ),
    (
        "data={train_files: [train.jsonl], weights: {train.jsonl: 1}, curriculum: length}",
        "data.weights: data.curriculum says the order of prompts too; leave one out",
    ),
    (
        "data.reader=my.readers.tsv",
        "data.reader: no module 'my.readers.tsv' can be imported",
    ),
    # the reward
    (f"{OWN}.path=broken.py", f"{OWN}: broken.py, line 1: invalid syntax"),
    (
        f"{OWN}.path=other.py",
        f"{OWN}: other.py defines no 'compute_score'; did you mean 'compute_scores'? (it defines compute_scores;"
        " wanted: compute_score(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs))",
    ),
    (
        f"{OWN}={{path: reward.py, name: too_few}}",
        f"{OWN}: reward.py:5: too_few(solution_str, ground_truth) cannot be called: got an unexpected keyword"
        " argument 'data_source' (it is called with data_source, solution_str, ground_truth, extra_info)",
    ),
    (
        f"{OWN}={{path: reward.py, reward_kwargs: {{scael: 2}}}}",
        f"{OWN}: reward.py:2: compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0)"
        " cannot be called: got an unexpected keyword argument 'scael' (it is called with data_source, solution_str,"
        " ground_truth, extra_info, scael)",
    ),
    (
        f"{OWN}.path=rewrad.py",
        f"{OWN}.path: no such file: rewrad.py (did you mean reward.py?)",
    ),
    (
        "reward.functions=[{name: score, path: reward.py}]",
        "reward.functions.0: reward.py defines no 'score' (it defines compute_score, too_few; wanted:"
        " score(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs))",
    ),
    (
        "reward.functions=[{name: format, kwargs: {patern: x}}]",
        "reward.functions.0.kwargs.patern: no such option; did you mean 'pattern'?",
    ),
    (
        "reward.functions=[{name: length, kwargs: {buffer: 9999}}]",
        "reward.functions.0.kwargs: buffer 9999 exceeds max_length 512 (got {'buffer': 9999})",
    ),
    (
        "reward.functions=[{name: code}]",
        "reward.functions.0.name: code runs programs of the policy: set reward.recipe_sandbox: strict",
    ),
    (
        "reward.judges=[{kind: modl}]",
        "reward.judges.0.kind: got 'modl'; did you mean 'model'? (known: generative, grpc, http, model, pooling, or a"
        " dotted path)",
    ),
    (
        "reward.judges=[{kind: model, options: {path: nowhere}}]",
        "reward.judges.0.options.path: no reward model there: nowhere/config.json is missing",
    ),
    (
        "reward.judges=[{kind: model, options: {path: model, dtpye: float16}}]",
        "reward.judges.0.options.dtpye: no such option; did you mean 'dtype'?",
    ),
    (
        "reward.judges=[{kind: http, options: {url: judge:8000}}]",
        "reward.judges.0.options.url: 'judge:8000' does not start with http:// or https://",
    ),
    (
        "reward.judges=[{kind: http, options: {url: 'http://judge', token_env: JUDGE_TOKEN_UNSET}}]",
        "reward.judges.0.options.token_env: the variable JUDGE_TOKEN_UNSET is not set",
    ),
    (
        "reward.judges=[{kind: http, options: {url: 'http://judge', headers: {Authorization: Bearer x}}}]",
        "reward.judges.0.options.url: a secret would travel to http://judge unencrypted: use https://, or"
        " allow_plain_http in a network that you trust",
    ),
    (
        "reward.judges=[{kind: generative, options: {url: 'http://judge'}}]",
        "reward.judges.0.options.model: Field required (got {'url': 'http://judge'})",
    ),
    # engines, stores, carriers, loggers
    (
        "rollout.engine.nonsense=1",
        "rollout.engine.nonsense: no such option; known: device, dtype, max_model_len,",
    ),
    (
        "rollout.engine.dtype=fp8",
        "rollout.engine.dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16' (got 'fp8')",
    ),
    (
        "rollout.name=vllm",
        "rollout.name: vllm is not installed here; set rollout.engine.python to the interpreter of its environment,"
        " or rollout.engine.url to a server that runs",
    ),
    (
        "rollout={name: vllm, engine: {python: /gone/python}}",
        "rollout.engine.python: no such program: /gone/python",
    ),
    (
        "rollout={name: sglang, engine: {command: [serve-it]}}",
        "rollout.engine.command: no program 'serve-it' here",
    ),
    (
        "rollout={name: vllm, engine: {url: 'http://a', tensor_parallel: 2}}",
        "rollout.engine.tensor_parallel: no such option; ",
    ),
    (
        "rollout={name: sglang, top_k: 20, top_p: 0.7, engine: {url: 'http://a'}}",
        "rollout.top_k_top_p: top_k 20 with top_p 0.7: sglang takes top_p of the whole distribution; want joint to"
        " accept that, or one of the two alone",
    ),
    (
        "rollout={name: vllm, engine: {url: 'http://a:1', weight_staging: device}}",
        "rollout.engine.weight_staging: device, and weights.carrier gloo brings weights to the host: want nccl",
    ),
    ("reward.registry.tokens=none.yaml", "reward.registry.tokens: no such file: none.yaml"),
    (
        "rollout={name: vllm, engine: {url: 'http://a:1', max_lora_rank: 8}}",
        "rollout.engine.max_lora_rank: 8, and the trainer sends whole weights: want model.lora_rank, or",
    ),
    (
        "rollout={top_k: 20, top_p: 0.7, top_k_top_p: joint}",
        "rollout.top_k_top_p: top_k 20 with top_p 0.7: torch takes top_p of what top_k has left; want sequential",
    ),
    (
        "trainer={nproc: 2, parallel: {expert: 2}}",
        "trainer.parallel.expert: model has no experts; want 1",
    ),
    ("rollout.routing_replay=true", "rollout.routing_replay: model has no experts; want false"),
    (
        "trainer.parallel.expert=2",
        "trainer.parallel.expert: 2 does not divide trainer.nproc, 1",
    ),
    (
        "trainer={nnodes: 3, nproc: 3, parallel: {expert: 2}}",
        "trainer.parallel.expert: 2 does not divide trainer.nproc * trainer.nnodes, 9",
    ),
    (
        "model.path=gemma",
        "rollout.name: the torch engine cannot run Gemma2ForCausalLM of gemma (it runs LlamaForCausalLM,"
        " MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,"
        " Qwen3MoeForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM;"
        " other models need rollout.name=vllm or sglang)",
    ),
    (
        "model.path=deepseek",
        "rollout.name: the torch engine cannot run DeepseekV3ForCausalLM of deepseek (it runs LlamaForCausalLM,"
        " MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM,"
        " Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM;"
        " other models need rollout.name=vllm or sglang)",
    ),
    ("rollout.name=vlm", "rollout.name: got 'vlm'; did you mean 'vllm'? (known: "),
    (
        "weights.carrier=nccl",
        "weights.carrier: nccl: weights.nccl.library: cupy needs the package cupy, which is not installed",
    ),
    (
        "weights.carrier=cuda_ipc",
        "weights.carrier: cuda_ipc: weights.ipc.library: cupy needs the package cupy, which is not installed",
    ),
    ("queue.store=redis", "queue.store: redis needs the package redis, which is not installed"),
    (
        "trainer.logger=[wandb]",
        "trainer.logger: wandb is not installed; pip install 'meshrl[logging]'",
    ),
    (
        "trainer.logger=[console,tensorboard]",
        "trainer.logger: tensorboard is not installed; pip install 'meshrl[logging]'",
    ),
    (
        "trainer={device: cuda, nproc: 4}",
        "trainer.device: cuda, 4 ranks (trainer.nproc), and this machine has 2 GPUs",
    ),
    # programs
    (
        "rollout={program: openai, program_options: {function: 'agent.py:debat'}}",
        "rollout.program_options.function: 'debat' is not in agent.py; did you mean 'debate'?",
    ),
    (
        "rollout={program: openai, program_options: {function: 'broken_agent.py:debate'}}",
        "rollout.program_options.function: broken_agent.py, line 1: invalid syntax",
    ),
    (
        "rollout={program: user, program_options: {function: 'agent.py:add'}}",
        "rollout.program_options.function: 'agent.py:add' is not async; want ",
    ),
    (
        "rollout={program: tools, program_options: {tools: [{python: {}}]}}",
        "rollout.program_options.tools.0.python: needs the strict sandbox: there is no bwrap on PATH",
    ),
    (
        "rollout={program: tools, program_options: {tools: ['agent.py:ad']}}",
        "rollout.program_options.tools.0.function: 'ad' is not in agent.py; did you mean 'add'?",
    ),
    # the algorithm
    (
        "actor.kl_loss_type=k9",
        "actor.kl_loss_type: want one of kl, k1, abs, mse, k2, low_var_kl, k3, or one with + behind it (got 'k9')",
    ),
    (
        "algorithm.kl_penalty=foo",
        "algorithm.kl_penalty: want one of kl, k1, abs, mse, k2, low_var_kl, k3, or one with + behind it (got 'foo')",
    ),
    (
        f"{CORRECTION}={{rollout_rs: token_k9, rollout_rs_threshold: 2}}",
        f"{CORRECTION}.rollout_rs: rollout_rs 'token_k9': token_k9 is no statistic (known: token_k1, ",
    ),
    (
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs: rollout_rs 'token_k1' needs rollout_rs_threshold",
    ),
    (
        f"{CORRECTION}.rollout_is_threshold=lots",
        f"{CORRECTION}.rollout_is_threshold: rollout_is_threshold 'lots': wanted a number",
    ),
    (
        "actor.policy_loss.loss_mode=dro",
        "actor.policy_loss.dro_beta is missing: the loss dro has no default for it",
    ),
    (
        "actor.policy_loss.loss_mode=gspos",
        "actor.policy_loss.loss_mode: got 'gspos'; did you mean 'gspo'?",
    ),
    ("actor.clip_ratio_c=0.5", "actor.clip_ratio_c: got 0.5, want a number > 1 or null"),
    (
        "algorithm={adv_estimator: gdpo, gdpo_reward_keys: [acc, format], gdpo_reward_weights: [1]}",
        "algorithm.gdpo_reward_weights has 1 entries for 2 keys (algorithm.gdpo_reward_keys)",
    ),
    ("algorithm.name=grop", "algorithm.name: no recipes named 'grop'; did you mean 'grpo'?"),
    # the model
    (
        "model.path=modle",
        "model.path: no such directory: modle (did you mean model?); want the directory of ",
    ),
    (
        "model={path: lora, use_dora: true}",
        "model: use_dora: true is of adapters: want lora_rank above 0",
    ),
    (
        "model={path: lora, lora_rank: 8, target_modules: [q_porj]}",
        "model.target_modules: the model has no module 'q_porj'; did you mean 'q_proj'? (it has k_proj, q_proj)",
    ),
    (
        "model={path: lora, lora_rank: 8, exclude_modules: '*proj'}",
        "model.exclude_modules: '*proj' is no regular expression",
    ),
    (
        "model={path: lora, lora_rank: 8, lora_adapter_path: empty}",
        "model.lora_adapter_path: empty is no LoRA adapter of peft's (no adapter_config.json)",
    ),
    (
        "model={path: lora, lora_rank: 8, target_modules: '*proj'}",
        "model.target_modules: '*proj' is no regular expression: nothing to repeat at position 0",
    ),
    (
        "model={path: lora, tokenizer_path: empty}",
        "model.tokenizer_path: empty has no tokenizer (tokenizer.json, tokenizer.model, vocab.json)",
    ),
    (
        "data.train_files=[chat.jsonl]",
        "data.train_files.0: chat.jsonl:1: the prompt is a chat and the tokenizer has no chat template",
    ),
    (
        "data.train_files=[text.jsonl]",
        "data.train_files.0: text.jsonl:1: not JSON: Extra data: line 1 column 3 (char 2)",
    ),
    (
        "model={path: mixture, lora_rank: 8, target_modules: [q_proj, down_proj]}",
        "model.target_modules: 'down_proj' names experts, which share one tensor and get no adapter; want modules of",
    ),
    (
        "model={path: mixture, lora_rank: 8, target_modules: '.*(q|gate)_proj'}",
        "model.target_modules: '.*(q|gate)_proj' names experts, which share one tensor and get no adapter",
    ),
    (
        "model={path: mixture, lora_rank: 8, target_modules: [gate]}",
        "model.target_modules: 'gate' names experts, which share one tensor and get no adapter",
    ),
    (
        "model.path=biased",
        "model.path: the output embedding of biased has a bias, which is not supported; want another model",
    ),
    (
        "model.path=chunked",
        "model.path: chunked is not supported: layer_types chunked_attention: rows of a pack would see each other;"
        " want a model that docs/reference/models.md says is trained",
    ),
    (
        "model.path=hybrid",
        "model.path: hybrid is not supported: layer_types linear_attention: rows of a pack would see each other;",
    ),
    (
        "model.path=unlisted",
        "model.path: unlisted is not supported: jamba has layers of other kinds than attention: rows of a",
    ),
    (
        "model.path=bart",
        "model.path: bart is not supported: bart: it counts positions over the whole pack; want a model that",
    ),
    ("model.path=gelu", "rollout.name: the torch engine cannot run the activation gelu of gelu"),
    (
        "model.path=dynamic",
        "rollout.name: the torch engine cannot run the rope type dynamic of dynamic (it computes default, linear,",
    ),
    (
        "rollout={name: torch, engine: {max_model_len: 4096}}",
        "rollout.engine.max_model_len: 4096, and model allows 2048; want at most that",
    ),
    (
        "rollout={name: vllm, engine: {url: 'http://a', max_model_len: 4096}}",
        "rollout.engine.max_model_len: 4096, and model allows 2048; want at most that",
    ),
    (
        "data.max_response_length=4096",
        "data.max_response_length: prompt and response may have 4608 tokens, ",
    ),
]
"""An override that makes a good recipe wrong, and the line, or the beginning of it, that it gets."""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the assumed machine does not describe: a checkpoint with weights, agents, a file that is no data."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(RECIPE)
    Path("machine.yaml").write_text(json.dumps(MACHINE))
    Path("agent.py").write_text("def debate(base_url, api_key, task): ...\ndef add(a: int): ...\n")
    Path("broken_agent.py").write_text("def debate(:\n")
    Path("text.jsonl").write_text("1 + 1 = 2\n")
    chat = [{"role": "user", "content": "hello"}]
    Path("chat.jsonl").write_text(json.dumps({"prompt": chat, "answer": "hi"}))
    Path("empty").mkdir()
    Path("empty/readme").write_text("")
    layer = "model.layers.0"
    qk = [f"{layer}.self_attn.{name}_proj.weight" for name in "qk"]
    experts = [f"{layer}.mlp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    for name, more in (
        ("lora", []),
        ("model", []),
        ("mixture", [*experts, f"{layer}.mlp.gate.weight"]),
        ("biased", ["lm_head.weight", "lm_head.bias"]),
    ):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(MIXTURE if name == "mixture" else QWEN))
        write_tokenizer(Path(name))
        write_weights(Path(name, "model.safetensors"), [*qk, *more])


TENSOR = ["trainer.nproc=4", "trainer.parallel.tensor=4"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["model.path=heads", *TENSOR],
            "trainer.parallel.tensor: 4 does not divide the 2 key heads of heads; want 1 or 2",
        ),
        (
            ["model.path=odd", *TENSOR],
            "trainer.parallel.tensor: 4 does not divide the 90 intermediate_size of odd; want 1 or 2",
        ),
        (
            ["model.path=stateful", "trainer.nproc=2", "trainer.parallel.tensor=2"],
            "trainer.parallel.tensor: layers that keep a state from one token to the next are not shared by sequence",
        ),
        (
            ["model.path=stateful", "trainer.nproc=2", "model.ulysses_sequence_parallel_size=2"],
            "model.ulysses_sequence_parallel_size: layers that keep a state from one token to the next are not",
        ),
        (
            ["model.path=kimi", "trainer.nproc=2", "trainer.parallel.expert=2"],
            "trainer.parallel.expert: the experts of kimi_linear are not shared among ranks; want 1",
        ),
        (
            ["model.path=mixture", "actor.moe_router_bias_update_rate=0.001"],
            "actor.moe_router_bias_update_rate: the routers of mixture have no e_score_correction_bias; want 0, or",
        ),
    ],
)
def test_what_the_trainer_would_refuse_of_a_model_is_one_line(
    overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), overrides, machine=machine())
    (only,) = str(caught.value).splitlines()
    assert only.startswith(f"command line: {overrides[-1]}: {says}")


def test_what_the_trainer_can_do_with_such_models_is_good() -> None:
    latent = {**QWEN, **HEADS, "kv_lora_rank": 8}
    assumed = Written.read(Path("machine.yaml"), ()).as_config(Assumptions)
    models = {**assumed.models, Path("heads"): latent}
    here = AssumedMachine(assumed.model_copy(update={"gpus": 8, "models": models}))
    load_recipe(Path("my.yaml"), ["model.path=heads", *TENSOR], machine=here)
    for targets in ("[q_proj]", "all-linear", "'.*self_attn.*'"):
        adapted = f"model={{path: mixture, lora_rank: 8, target_modules: {targets}}}"
        load_recipe(Path("my.yaml"), [adapted], machine=machine())


def machine(*, real_model: bool = False) -> AssumedMachine:
    assumed = Written.read(Path("machine.yaml"), ()).as_config(Assumptions)
    if real_model:
        assumed = assumed.model_copy(update={"models": {}})
    return AssumedMachine(assumed)


@pytest.mark.parametrize(
    ("model", "says"),
    [("lora_rank: 16", "adapters of rank 16"), ("lora_rank: 8, use_dora: true", "DoRA's merged")],
)
def test_a_server_of_adapters_is_refused_what_it_cannot_serve(model: str, says: str) -> None:
    served = "rollout={name: vllm, engine: {url: 'http://a:1', max_lora_rank: 8}}"
    with pytest.raises(ConfigError, match=f"max_lora_rank: 8, and the trainer sends {says}"):
        load_recipe(Path("my.yaml"), [f"model={{path: model, {model}}}", served], machine=machine())


def test_the_recipe_that_the_mistakes_are_made_in_is_good() -> None:
    load_recipe(Path("my.yaml"), machine=machine())


def test_there_are_at_least_sixty_wrong_recipes() -> None:
    assert len({override for override, _ in WRONG}) == len(WRONG) >= 60


@pytest.mark.parametrize(("override", "line"), WRONG, ids=[override for override, _ in WRONG])
def test_a_wrong_recipe_is_one_line_before_anything_starts(override: str, line: str) -> None:
    here = machine(real_model="chat.jsonl" in override)
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), [override], machine=here)
    (only,) = str(caught.value).splitlines()
    origin = f"command line: {override}: "
    assert only.startswith((origin + line, f"my.yaml: {line}", f"my.yaml:3: {line}"))


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        (
            "data.train_files=[train.jsonl]",
            "says which prompts are asked, and so does data.train_files: leave one out",
        ),
        ("data.curriculum=length", "and so does data.curriculum: leave one out"),
        ("trainer.test_freq=-1", "follows held-out scores: want trainer.test_freq above 0"),
        (
            "data.val_max_samples=9",
            "follows the scores of all 100 held-out prompts: leave data.val_max_samples out",
        ),
    ],
)
def test_what_keeps_levels_from_following_scores_is_said(override: str, wrong: str) -> None:
    gym = "data={reasoning_gym: {tasks: {gcd: {}}, levels: 2, curriculum: {raise_at: 0.7}}}"
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), [gym, "trainer.test_freq=5", override], machine=machine())
    lines = [line for line in str(caught.value).splitlines() if wrong in line]
    assert len(lines) == 1 and "data.reasoning_gym.curriculum: " in lines[0]


def test_a_group_of_one_row_with_a_group_baseline_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_recipe(Path("my.yaml"), ["rollout.n=1", "rollout.name=torch"], machine=machine())
    assert capsys.readouterr().err == (
        "warning: command line: rollout.n=1: rollout.n: algorithm.adv_estimator grpo compares the rows of a group,"
        " and a group of one row has advantage 0: nothing is learned; raise rollout.n\n"
    )
    load_recipe(
        Path("my.yaml"),
        ["rollout.n=1", "rollout.name=torch", "algorithm.adv_estimator=reinforce_plus_plus"],
        machine=machine(),
    )
    assert not capsys.readouterr().err


def test_checking_a_recipe_imports_neither_torch_nor_grpc() -> None:
    overrides = [
        ("rollout.engine.nonsense=1",),
        ("rollout={name: vllm, engine: {url: 'http://a'}}",),
        ("reward.judges=[{kind: model, options: {path: model}}]", "weights.carrier=gloo"),
        ("reward.functions=[{name: math}, {name: format}]", "actor.use_kl_loss=true"),
    ]
    code = f"""
import sys
from pathlib import Path
from meshrl.config import load_recipe
from meshrl.contract.errors import ConfigError
for overrides in {overrides!r}:
    try:
        load_recipe(Path("my.yaml"), overrides)
    except ConfigError:
        pass
print([name for name in ("torch", "transformers", "grpc") if name in sys.modules])
"""
    Path("train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_assumed_of_another_machine_is_said_line_by_line() -> None:
    assumed = Assumptions.model_validate(
        {
            "gpus": 8,
            "packages": {"vllm": True, "wandb": False},
            "programs": {"vllm": True},
            "models": {"/models/big": QWEN},
            "rows": {"/data/a.parquet": [{"prompt": "?"}]},
            "files": {"/data/reward.py": "a\nb\n"},
        }
    )
    assert list(assumed.lines()) == [
        "8 GPUs",
        "the package vllm is installed",
        "the package wandb is not installed",
        "the program vllm is there",
        "/models/big is a checkpoint of Qwen2ForCausalLM with weights and tokenizer",
        "/data/a.parquet begins with 1 given rows",
        "/data/reward.py is a file of 2 given lines",
    ]


def test_a_recipe_of_another_machine_is_checked_against_what_is_assumed() -> None:
    theirs = Assumptions.model_validate(
        {
            "gpus": 8,
            "packages": {"vllm": True, "cupy": True},
            "models": {"/models/big": QWEN},
            "rows": {"/data/a.parquet": [{"prompt": "?", "answer": "!"}]},
        }
    )
    overrides = [
        "model.path=/models/big",
        "data.train_files=[/data/a.parquet]",
        "rollout.name=vllm",
        "weights.carrier=nccl",
        "trainer.device=cuda",
        "trainer.nproc=8",
        "placement.machines={there: 8, and-there: 8}",
    ]
    load_recipe(Path("my.yaml"), overrides, machine=AssumedMachine(theirs))
    with pytest.raises(ConfigError, match=r"no such directory: /models/big"):
        load_recipe(Path("my.yaml"), overrides, machine=ThisMachine())
