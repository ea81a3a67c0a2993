"""Passes and optimizer steps of models that callers train, against formulas and optimizers that are not ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl.contract.errors import BusyError, UserError
from meshrl.contract.types import AdamStep, CreateModel, Media, Pass, TrainingExample
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses import cispo, dro, gspo, vanilla
from meshrl.trainer.algorithms.losses._types import LossInputs
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import ActorConfig, ModelConfig
from meshrl.trainer.hosted import losses
from meshrl.trainer.hosted.workbench import PolicyBench, PolicyModel
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from tests.doubles import vision_rows

from ...pictures import make_model
from . import tiny

PROMPT = 5
RATIO = {"logprobs", "advantages"}
FULL = CreateModel(base_model="tiny")
LORA = CreateModel(base_model="tiny", lora_rank=4)


@pytest.fixture(scope="module")
def bench(tiny_path: Path, world: World) -> PolicyBench:
    return PolicyBench(ModelConfig(path=tiny_path), world, tokens_at_once=64)


@pytest.fixture
def whole(bench: PolicyBench) -> Any:
    model = bench.create(FULL)
    yield model
    model.close()


def examples(loss: str, seed: int = 1) -> list[TrainingExample]:
    """Two groups of siblings, each shifted by one as Tinker has them, and a row of one token."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, tiny.VOCABULARY, 2).astype(np.int32)]
    for _ in range(2):
        prompt = draw.integers(0, tiny.VOCABULARY, PROMPT)
        for length in (7, 19, 24):
            answer = draw.integers(0, tiny.VOCABULARY, length)
            rows.append(np.concatenate([prompt, answer]).astype(np.int32))
    found = []
    for row in rows:
        count = len(row) - 1
        sampled = (np.arange(count) >= PROMPT - 1) | (count < PROMPT)
        given: dict[str, Any] = {"target_tokens": row[1:].astype(np.int64)}
        if loss == "cross_entropy":
            given["weights"] = draw.random(count).astype(np.float32) * sampled
        else:
            given["logprobs"] = (draw.normal(-3.6, 0.7, count) * sampled).astype(np.float32)
            given["advantages"] = (draw.normal(0, 1, count) * sampled).astype(np.float32)
        if loss == "gspo":
            given["sequence_ratio_mask"] = sampled.astype(np.float32)
        if loss == "stable_reinforce":
            given["mask"] = sampled.astype(np.float32)
        found.append(TrainingExample(tokens=row[:-1], loss_inputs=given))
    return found


def tinker_loss(
    name: str, logprobs: torch.Tensor, inputs: Mapping[str, Any], settings: Mapping[str, float]
) -> torch.Tensor:
    """The formulas of Tinker's pages, row by row."""
    given = {key: torch.from_numpy(np.asarray(value)) for key, value in inputs.items()}
    if name == "cross_entropy":
        return -(logprobs * given.get("weights", torch.ones(()))).sum()
    sampled, advantages = given["logprobs"], given["advantages"]
    if name == "importance_sampling":
        return -(torch.exp(logprobs - sampled) * advantages).sum()
    if name == "dro":
        square = (logprobs - sampled).square()
        return -(logprobs * advantages - 0.5 * settings.get("beta", 0.1) * square).sum()
    if name == "stable_reinforce":
        square = (logprobs - sampled).square()
        value = logprobs * advantages - 0.5 * settings.get("kl_coeff", 0.01) * square
        return -(value * given["mask"]).sum()
    ratio = torch.exp(logprobs - sampled)
    defaults = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}[name]
    low = given.get("clip_low_threshold", settings.get("clip_low_threshold", defaults[0]))
    high = given.get("clip_high_threshold", settings.get("clip_high_threshold", defaults[1]))
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * advantages * logprobs).sum()
    if name == "gspo":
        inside = given["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - sampled)[inside].mean()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def reference(
    path: Path, request: Pass
) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Loss, gradients and log-probs by transformers' own forward pass of each row alone."""
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    total, found = torch.zeros(()), []
    for example in request.examples:
        logits = hf(torch.from_numpy(example.tokens.astype(np.int64))[None]).logits[0]
        targets = torch.from_numpy(example.loss_inputs["target_tokens"])
        wide = targets.reshape(len(targets), -1)
        logprobs = logits.log_softmax(-1).gather(1, wide).reshape(targets.shape)
        found.append(logprobs.detach())
        total = total + tinker_loss(
            request.loss, logprobs, example.loss_inputs, request.loss_settings
        )
    total.backward()
    gradients = {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients, found


def gradients(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model._own.items() if p.grad is not None}


def apart(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)
    norm = sum(float(theirs[n].double().square().sum()) for n in theirs)
    assert norm > 0
    return math.sqrt(difference / norm)


CASES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    ("dro", {}),
    ("dro", {"beta": 0.7}),
    ("dro", {"beta": 0.0}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    ("stable_reinforce", {}),
    ("stable_reinforce", {"kl_coeff": 0.3}),
]


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_loss_gradients_and_logprobs_are_those_of_tinkers_formulas(
    whole: PolicyModel, tiny_path: Path, loss: Any, settings: dict[str, float]
) -> None:
    request = Pass(examples=examples(loss), loss=loss, loss_settings=settings)
    total, wanted, logprobs = reference(tiny_path, request)
    answer = whole.forward_backward(request)
    assert answer.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert apart(gradients(whole), wanted) < 1e-5
    for output, theirs in zip(answer.outputs, logprobs, strict=True):
        np.testing.assert_allclose(output["logprobs"], theirs, atol=1e-5)
    whole.forward_backward(request)
    twice = {name: 2 * gradient for name, gradient in wanted.items()}
    assert apart(gradients(whole), twice) < 1e-5


TRAINERS: dict[str, Any] = {"ppo": vanilla, "cispo": cispo, "gspo": gspo, "dro": dro}


def trained_twice(bench: PolicyBench, path: Path, verb: CreateModel, first: Pass) -> Any:
    """A model after a step, the trainer's policy with its weights, and their parameters there."""
    config = ModelConfig(path=path, lora_rank=verb.lora_rank or 0, lora_alpha=32)
    policy, model = build_policy(open_hf(path), bench.world, config), bench.create(verb)
    model.forward_backward(first)
    model.step(AdamStep(learning_rate=0.01))  # B is no longer 0
    own: Any = dict(policy.hf.named_parameters())
    with torch.no_grad():
        for name, parameter in model._own.items():
            own[name].to_local().copy_(parameter)
    return model, policy, own


@pytest.mark.parametrize("loss", ["cross_entropy", *TRAINERS])
@pytest.mark.parametrize("verb", [FULL, LORA])
def test_gradients_are_the_trainers_own(
    bench: PolicyBench, tiny_path: Path, loss: Any, verb: CreateModel
) -> None:
    """The same rows in one pack as the trainer lays it, of which response tokens alone are projected."""
    given = [each for each in examples(loss) if len(each.tokens) > PROMPT]
    first = Pass(examples=examples("cross_entropy"), loss="cross_entropy")
    model, policy, own = trained_twice(bench, tiny_path, verb, first)
    model.forward_backward(Pass(examples=given, loss=loss))

    prompt = 1 if loss == "dro" else PROMPT  # which counts a prompt, too
    rows = [
        np.append(e.tokens, e.loss_inputs["target_tokens"][-1:]).astype(np.int32) for e in given
    ]
    logprobs = policy(pack(rows, [prompt] * len(rows)), 1.0)[0]
    lengths = torch.tensor([len(row) - prompt for row in rows])

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([e.loss_inputs[name][prompt - 1 :] for e in given]))

    if loss == "cross_entropy":
        (-(logprobs * column("weights")).sum()).backward()
    else:
        inputs = LossInputs(
            ragged=Ragged.from_lengths(lengths, torch.ones(len(logprobs), dtype=torch.bool)),
            logprobs=logprobs,
            old_logprobs=column("logprobs"),
            advantages=column("advantages"),
        )
        clip = {"ppo": (0.2, 0.2), "cispo": (1.0, 3.0), "gspo": (3e-4, 4e-4), "dro": (0.2, 0.2)}
        options = {"loss_mode": "dro", "dro_beta": 0.1} if loss == "dro" else {}
        actor = ActorConfig.model_validate(
            {
                "clip_ratio_low": clip[loss][0],
                "clip_ratio_high": clip[loss][1],
                "clip_ratio_c": 1e9,
                "policy_loss": options,
            }
        )
        TRAINERS[loss].compute(inputs, actor, Aggregator(mode="token-sum")).loss.backward()
    theirs = {n: p.grad.to_local() for n, p in own.items() if p.grad is not None}
    assert apart(gradients(model), theirs) < 1e-6
    model.close()


def shown(path: Path) -> Pass:
    """Rows with pictures."""
    given = []
    for row in vision_rows.rows(path):
        targets = {"target_tokens": row.tokens[1:].astype(np.int64)}
        given.append(TrainingExample(tokens=row.tokens[:-1], media=row.media, loss_inputs=targets))
    return Pass(examples=given, loss="cross_entropy")


@pytest.mark.parametrize("verb", [FULL, LORA])
@pytest.mark.parametrize("at_once", [8192, 16])
def test_gradients_on_pictures_are_the_trainers_own(
    tmp_path: Path, world: World, verb: CreateModel, at_once: int
) -> None:
    make_model(tmp_path)
    request = shown(tmp_path)
    bench = PolicyBench(ModelConfig(path=tmp_path), world, tokens_at_once=at_once)
    bench.check(request)
    model, policy, own = trained_twice(bench, tmp_path, verb, request)
    model.forward_backward(request)
    reader, rows = VisionReader(tmp_path, policy.hf), vision_rows.rows(tmp_path)
    images = [reader.of_row(row) for row in rows]
    packed = pack([row.tokens for row in rows], [1] * len(rows), images=images)
    (-policy(packed, 1.0)[0].sum()).backward()
    theirs = {n: p.grad.to_local() for n, p in own.items() if p.grad is not None}
    assert apart(gradients(model), theirs) < 1e-6
    assert not any(".visual." in name for name in model._own)
    model.close()


def test_pictures_that_are_not_those_of_their_tokens_are_refused(
    bench: PolicyBench, tmp_path: Path, world: World
) -> None:
    make_model(tmp_path)
    sees, row = PolicyBench(ModelConfig(path=tmp_path), world), shown(tmp_path).examples[0]
    cut = (Media.of(row.media[0].data[:200]),)
    for served, change, wanted in (
        (bench, {}, "example 0: it has pictures, and the base model reads text only"),
        (sees, {"media": cut}, "example 0, picture 1: no picture that can be read"),
        (sees, {"media": row.media * 2}, "example 0: picture 2 wants"),
        (sees, {"tokens": np.maximum(row.tokens, 8)}, "example 0: picture 1 wants"),
    ):
        changed = dataclasses.replace(row, **change)
        with pytest.raises(UserError, match=wanted):
            served.check(Pass(examples=[changed], loss="cross_entropy"))


@pytest.mark.parametrize("several", [1, 3])
def test_several_targets_of_a_token(whole: PolicyModel, tiny_path: Path, several: int) -> None:
    draw = np.random.default_rng(0)
    given = []
    for example in examples("cross_entropy"):
        shape = (len(example.tokens), several)
        inputs = {
            "target_tokens": draw.integers(0, tiny.VOCABULARY, shape),
            "weights": draw.random(shape).astype(np.float32),
        }
        given.append(TrainingExample(tokens=example.tokens, loss_inputs=inputs))
    request = Pass(examples=given, loss="cross_entropy")
    total, wanted, logprobs = reference(tiny_path, request)
    answer = whole.forward_backward(request)
    assert answer.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert apart(gradients(whole), wanted) < 1e-5
    for output, theirs in zip(answer.outputs, logprobs, strict=True):
        np.testing.assert_allclose(output["logprobs"], theirs, atol=1e-5)


def test_thresholds_of_each_token_and_mixed_rows(whole: PolicyModel, tiny_path: Path) -> None:
    draw = np.random.default_rng(0)
    given = examples("ppo")
    for example in given:
        count = len(example.tokens)
        example.loss_inputs["clip_low_threshold"] = draw.uniform(0.5, 0.9, count).astype(np.float32)  # type: ignore[index]
        example.loss_inputs["clip_high_threshold"] = draw.uniform(1.0, 1.5, count).astype(
            np.float32
        )  # type: ignore[index]
    request = Pass(examples=given, loss="ppo")
    total, wanted, _ = reference(tiny_path, request)
    assert whole.forward_backward(request).metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert apart(gradients(whole), wanted) < 1e-5


def test_a_forward_pass_leaves_gradients_and_weights_alone(whole: PolicyModel) -> None:
    request = Pass(examples=examples("ppo"), loss="ppo")
    answer = whole.forward_backward(dataclasses.replace(request, backward=False))
    assert not gradients(whole)
    again = whole.forward_backward(request)
    assert answer.metrics == again.metrics
    before = gradients(whole)
    whole.forward_backward(dataclasses.replace(request, backward=False))
    assert apart(gradients(whole), before) == 0


@pytest.mark.parametrize("verb", [FULL, LORA])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_torchs_adamw(bench: PolicyBench, verb: CreateModel, clip: float) -> None:
    model = bench.create(verb)
    ours = [parameter.detach().clone().requires_grad_() for parameter in model._own.values()]
    steps = [
        AdamStep(learning_rate=1e-2, grad_clip_norm=clip),
        AdamStep(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
        AdamStep(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=clip),
    ]
    optimizer = torch.optim.AdamW(ours)
    for index, step in enumerate(steps):
        model.forward_backward(Pass(examples=examples("ppo", index), loss="ppo"))
        for parameter, own in zip(ours, model._own.values(), strict=True):
            parameter.grad = None if own.grad is None else own.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(ours, step.grad_clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"], group["eps"] = step.learning_rate, step.eps
            group["betas"] = (step.beta1, step.beta2)
            group["weight_decay"] = step.weight_decay
        optimizer.step()
        assert model.step(step).metrics == {"grad_norm": pytest.approx(float(norm))}
        assert not gradients(model)
        for parameter, own in zip(ours, model._own.values(), strict=True):
            assert torch.equal(parameter, own)
    model.close()


def trained(model: PolicyModel, *seeds: int) -> list[torch.Tensor]:
    """Weights after a step on the examples of each seed."""
    for seed in seeds:
        model.forward_backward(Pass(examples=examples("ppo", seed), loss="ppo"))
        model.step(AdamStep(learning_rate=1e-2))
    return [parameter.detach().clone() for parameter in model._own.values()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def test_models_that_take_turns_are_trained_as_if_alone(bench: PolicyBench) -> None:
    alone = bench.create(LORA)
    wanted = trained(alone, 1, 2, 3)
    alone.close()
    one, other = bench.create(LORA), bench.create(dataclasses.replace(LORA, lora_seed=7))
    third = bench.create(dataclasses.replace(LORA, lora_rank=2))
    assert one._seat is other._seat is not third._seat
    assert not equal(trained(one), trained(other))
    for seed in (1, 2, 3):
        one.forward_backward(Pass(examples=examples("ppo", seed), loss="ppo"))
        trained(other, seed + 5)
        trained(third, seed)
        found = one.step(AdamStep(learning_rate=1e-2))
        assert found.metrics["grad_norm"] > 0
    assert equal(trained(one), wanted)
    for model in (one, other, third):
        model.close()
    assert not bench._seats


@pytest.mark.parametrize("verb", [FULL, LORA])
def test_what_is_written_is_read_again_bit_for_bit(
    bench: PolicyBench, tmp_path: Path, verb: CreateModel
) -> None:
    model, other = bench.create(verb), bench.create(dataclasses.replace(verb, lora_seed=3))
    trained(model, 1, 2)
    model.forward_backward(Pass(examples=examples("ppo", 3), loss="ppo"))
    model.write(tmp_path)
    other.read(tmp_path, with_optimizer=True, with_gradients=True)
    assert apart(gradients(other), gradients(model)) == 0
    for each in (model, other):
        each.step(AdamStep(learning_rate=1e-2))
    assert equal(trained(other, 4), trained(model, 4))
    other.read(tmp_path, with_optimizer=False)
    assert not gradients(other) and not other._optimizer.state
    form = bench.create(dataclasses.replace(LORA, lora_rank=3))
    with pytest.raises(UserError, match="of another form"):
        form.read(tmp_path, with_optimizer=True)
    for each in (model, other, form):
        each.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("verb", [FULL, LORA])
def test_an_export_is_read_by_transformers_and_by_peft(
    bench: PolicyBench, tiny_path: Path, tmp_path: Path, verb: CreateModel
) -> None:
    model = bench.create(verb)
    trained(model, 1, 2)
    request = Pass(examples=examples("ppo", 4), loss="ppo", backward=False)
    wanted = model.forward_backward(request).outputs
    model.export(tmp_path / "made")
    _, _, found = reference(tmp_path / "made", request)
    for ours, theirs in zip(wanted, found, strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs, atol=1e-5)
    assert (tmp_path / "made" / "adapter" / "adapter_model.safetensors").exists() == (verb is LORA)
    if verb is LORA:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(tiny_path)
        with_adapter = PeftModel.from_pretrained(base, tmp_path / "made" / "adapter")
        example = request.examples[-1]
        logits = with_adapter(torch.from_numpy(example.tokens.astype(np.int64))[None]).logits[0]
        targets = torch.from_numpy(example.loss_inputs["target_tokens"])
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].detach()
        np.testing.assert_allclose(wanted[-1]["logprobs"], logprobs, atol=1e-5)
    model.close()


@pytest.mark.parametrize(
    ("attention", "mlp", "parts"),
    [(True, True, {"self_attn", "mlp"}), (True, False, {"self_attn"}), (False, True, {"mlp"})],
)
def test_which_modules_have_adapters(
    bench: PolicyBench, attention: bool, mlp: bool, parts: set[str]
) -> None:
    verb = dataclasses.replace(LORA, lora_attention=attention, lora_mlp=mlp)
    model = bench.create(verb)
    assert {name.split(".")[3] for name in model._own} == parts
    model.close()


def test_gradients_that_are_not_finite_are_dropped(whole: PolicyModel) -> None:
    before = trained(whole)
    request = Pass(examples=examples("cross_entropy"), loss="cross_entropy")
    request.examples[1].loss_inputs["weights"][:] = 3e38
    whole.forward_backward(request)
    with pytest.raises(UserError, match="not finite"):
        whole.step(AdamStep(learning_rate=1e-2))
    assert not gradients(whole) and equal(trained(whole), before)
    with pytest.raises(UserError, match="no gradients wait"):
        whole.step(AdamStep(learning_rate=1e-2))


def one(loss: str = "ppo", tokens: Any = None, **changes: Any) -> Pass:
    """A pass over one row, with inputs changed or (None) left out."""
    example = examples(loss)[1]
    inputs = {**example.loss_inputs, **changes}
    given = {name: value for name, value in inputs.items() if value is not None}
    kept = example.tokens if tokens is None else tokens
    return Pass(examples=[TrainingExample(tokens=kept, loss_inputs=given)], loss=loss)  # type: ignore[arg-type]


FLOATS = np.zeros(11, np.float32)
REFUSED: list[tuple[Any, str]] = [
    (one(advantages=None), "example 0: ppo wants advantages"),
    (one(target_tokens=None), "wants target_tokens"),
    (one("gspo", sequence_ratio_mask=None), "gspo wants sequence_ratio_mask"),
    (one("gspo", sequence_ratio_mask=FLOATS), "is 0 everywhere"),
    (one("stable_reinforce", mask=None), "stable_reinforce wants mask"),
    (one("cross_entropy", advantages=FLOATS), "cross_entropy does not read advantages"),
    (one(weights=FLOATS), "ppo does not read weights"),
    (one(logprobs=FLOATS[:-1]), "logprobs is float32[10]; want float32[11]"),
    (one(logprobs=FLOATS[None]), "want float32[11]"),
    (one(logprobs=FLOATS + np.nan), "not finite"),
    (one(advantages=FLOATS + np.inf), "not finite"),
    (one(advantages=np.zeros(11, bool)), "advantages is bool[11]"),
    (one(target_tokens=np.zeros(12, np.int64)), "want int64[11]"),
    (one(target_tokens=np.zeros((11, 2), np.int64)), "want int64[11]"),
    (one(target_tokens=FLOATS), "target_tokens is float32[11]"),
    (one("cross_entropy", target_tokens=np.zeros((11, 0), np.int64)), "0 targets of each"),
    (one("cross_entropy", target_tokens=np.zeros((11, 2), np.int64)), "weights is float32[11]"),
    (one(target_tokens=np.full(11, 37)), "outside the vocabulary, which has 37"),
    (one(tokens=np.full(11, -1, np.int32)), "outside the vocabulary"),
    (one(tokens=np.zeros(0, np.int32)), "want int32 and at least one"),
    (one(tokens=np.zeros(300, np.int32)), "300 tokens; the model reads at most 256"),
    (one(clip_low_threshold=FLOATS + 2, clip_high_threshold=FLOATS + 1), "somewhere"),
    (Pass(examples=[], loss="ppo"), "no examples"),
    (Pass(examples=examples("ppo"), loss="reinforce"), "not known; want one of cross_entropy"),  # type: ignore[arg-type]
    (Pass(examples=examples("ppo"), loss="ppo", loss_settings={"beta": 1}), "knows no 'beta'"),
    (
        Pass(examples=examples("ppo"), loss="ppo", loss_settings={"clip_low_threshold": 1.5}),
        "is above clip_high_threshold",
    ),
    (
        Pass(examples=examples("dro"), loss="dro", loss_settings={"beta": math.nan}),
        "beta is nan; want a number of at least 0",
    ),
    (
        Pass(examples=examples("dro"), loss="dro", loss_settings={"beta": "high"}),  # type: ignore[dict-item]
        "beta is 'high'",
    ),
    (
        Pass(
            examples=[
                one("cross_entropy").examples[0],
                one("cross_entropy", weights=None).examples[0],
            ],
            loss="cross_entropy",
        ),
        "example 1: has target_tokens, and example 0 target_tokens, weights",
    ),
    (AdamStep(learning_rate=-1.0), "learning_rate is -1.0"),
    (AdamStep(learning_rate=math.nan), "learning_rate is nan"),
    (AdamStep(learning_rate=1e38), "learning_rate is 1e+38; want a number from 0 to 1e+12"),
    (AdamStep(learning_rate=1.0, eps=0.0), "eps is 0.0; want a number from 1e-30"),
    (AdamStep(learning_rate=1.0, beta2=1.0), "beta2 is 1.0"),
    (AdamStep(learning_rate=1.0, grad_clip_norm=-1.0), "grad_clip_norm"),
    (dataclasses.replace(LORA, lora_rank=0), "LoRA rank 0; want 1 to 1024"),
    (dataclasses.replace(LORA, lora_attention=False, lora_mlp=False), "neither attention nor MLP"),
]


@pytest.mark.parametrize(("verb", "wanted"), REFUSED)
def test_what_cannot_be_computed_is_refused_in_one_line(
    bench: PolicyBench, verb: Any, wanted: str
) -> None:
    with pytest.raises(UserError) as refused:
        bench.check(verb)
    assert wanted in str(refused.value) and "\n" not in str(refused.value)


def test_every_loss_passes_the_check(bench: PolicyBench) -> None:
    for loss, settings in CASES:
        bench.check(Pass(examples=examples(loss), loss=loss, loss_settings=settings))  # type: ignore[arg-type]
    bench.check(one("cross_entropy", weights=None))
    bench.check(LORA)
    bench.check(FULL)


def test_a_pass_that_breaks_in_the_middle_changes_nothing(
    bench: PolicyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.create(LORA)
    request = Pass(examples=examples("ppo"), loss="ppo")
    model.forward_backward(request)
    before, calls = gradients(model), iter([losses.loss_of])
    with monkeypatch.context() as broken:
        broken.setattr(losses, "loss_of", lambda *given: next(calls)(*given))
        with pytest.raises(StopIteration):
            model.forward_backward(request)
    assert apart(gradients(model), before) == 0
    model.forward_backward(request)
    twice = {name: 2 * gradient for name, gradient in before.items()}
    assert apart(gradients(model), twice) == 0
    model.close()


def test_copies_of_the_base_are_few(bench: PolicyBench) -> None:
    forms = [FULL, FULL, LORA, dataclasses.replace(LORA, lora_rank=2)]
    made = [bench.create(verb) for verb in forms]
    shared = bench.create(LORA)
    with pytest.raises(BusyError, match="models of 4 forms, each with a copy of the base model"):
        bench.create(FULL)
    made[0].close()
    for model in (bench.create(FULL), shared, *made[1:]):
        model.close()
    assert not bench._seats


def test_the_base_model_is_called_by_the_end_of_its_path(tiny_path: Path, world: World) -> None:
    bench = PolicyBench(ModelConfig(path=tiny_path), world, names=["/data/Qwen/Qwen3-8B"])
    for name in ("/data/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen3-8B"):
        bench.check(CreateModel(base_model=name))
    for name in ("", "/", "Qwen", "8B", "/Qwen/Qwen3-8B", "data/Qwen3-8B", "../Qwen3-8B"):
        with pytest.raises(UserError, match="want /data/Qwen/Qwen3-8B"):
            bench.check(CreateModel(base_model=name))
