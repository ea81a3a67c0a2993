"""Models on one base, computed by the trainer's own policy: adapters that take turns in it, or all weights.

    request ──examples──▶ packs that lay shared beginnings once ──▶ log-probs ──▶ loss ──▶ gradients of the model
                                                                                             └──▶ AdamW ──▶ weights

Models with adapters of one form (rank, modules) share a policy, with its base. A computing model copies its adapters
in; gradients and the optimizer's state stay with the model. A model whose weights are all trained has a policy alone.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from meshrl.contract.errors import BusyError, UserError
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    Json,
    Pass,
    TrainingExample,
    TrainingResult,
    TrainingVerb,
)
from meshrl.images import reads_images, shared_processor
from meshrl.trainer.checkpoint.export import export_adapter, export_policy
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.hosted import is_called, losses
from meshrl.trainer.hosted.bench import Bench, Model
from meshrl.trainer.learner.optimizer import fused
from meshrl.trainer.model.attention import rows_per_laid
from meshrl.trainer.model.packing import cut_alike, pack
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)

LORA_ALPHA = 32
"""Tinker's, at every rank."""
MOST_POLICIES = 4
"""Copies of the base model: one of each form of adapters, one of each model whose weights are all trained."""
TOKENS_AT_ONCE = 8192
LEAST_EPS = 1e-30
"""A weight without a gradient is divided by it."""
MOST_SETTING = 1e12
"""AdamW's products of settings stay finite in float32."""
ATTENTION = r".*\.(self_attn|attn|attention|self_attention|linear_attn|mixer)\..*"
MLP = r".*\.(mlp|feed_forward|ffn|moe|block_sparse_moe)\..*"
_UNMARKED = np.zeros(1, np.uint8)
"""Pictures come before all places that were sampled, so that none has a mark."""
WEIGHTS, OPTIMIZER, GRADIENTS = (
    "weights.safetensors",
    "optimizer.safetensors",
    "gradients.safetensors",
)


@dataclass(slots=True, eq=False)
class _Seat:
    """A policy, and who computes in it."""

    config: ModelConfig
    policy: Policy
    trained: dict[str, nn.Parameter]
    reader: VisionReader | None
    """None: it reads no pictures."""
    models: int = 0
    taken_by: PolicyModel | None = None
    """The model whose adapters it has."""


class PolicyBench(Bench):
    """Makes models on the checkpoint of a recipe's `model` section."""

    def __init__(
        self,
        config: ModelConfig,
        world: World,
        *,
        names: Sequence[str] = (),
        tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        """Read the base model's configuration; its weights are read with the first model.

        Args:
            config: The base model; how it computes. Its LoRA settings are the callers' to choose.
            world: This process alone.
            names: What callers may call the base model; none: anything.
            tokens_at_once: Tokens that are laid in a pack.

        Raises:
            UserError: there are several ranks; the base model, or its way with pictures, cannot be read.
        """
        if world.size > 1:
            raise UserError("models for callers are trained by one rank so far; want one process")
        self._config, self._names = config, names
        self.world = world
        self.tokens_at_once = tokens_at_once
        self._seats: dict[str, _Seat] = {}
        text = open_hf(
            config.path, trust_remote_code=config.trust_remote_code
        ).config.get_text_config()
        self.images = shared_processor(config.path) if reads_images(config.path) else None
        """Reader of pictures; None for a base model of text."""
        self._vocabulary: int = text.vocab_size
        self.longest: int = getattr(text, "max_position_embeddings", None) or 1 << 30

    def check(self, verb: TrainingVerb) -> None:
        """Refuse what is wrong whatever the weights are."""
        match verb:
            case CreateModel():
                _check_model(verb, self._names)
            case Pass():
                losses.check(verb, vocabulary=self._vocabulary, longest=self.longest)
                self._check_pictures(verb)
            case AdamStep():
                _check_step(verb)

    def _check_pictures(self, request: Pass) -> None:
        for index, example in enumerate(request.examples):
            where, images = f"example {index}", self.images
            if images is None and example.media:
                raise UserError(f"{where}: it has pictures, and the base model reads text only")
            if images is not None:
                for number, picture in enumerate(example.media, 1):
                    images.check(picture, f"{where}, picture {number}")
                images.places(example.tokens, example.media, where)

    def create(self, verb: CreateModel) -> PolicyModel:
        """A model with fresh adapters, or the base model's weights."""
        rank = verb.lora_rank
        if rank is not None and verb.lora_unembedding:
            log.warning(
                "adapters of rank %d: the unembedding gets none, which is not supported", rank
            )
        form = f"{rank} {verb.lora_attention} {verb.lora_mlp}"
        seat = None if rank is None else self._seats.get(form)
        if seat is None:
            if len(self._seats) >= MOST_POLICIES:
                raise BusyError(
                    f"there are models of {MOST_POLICIES} forms, each with a copy of the base model: want a rank"
                    " and modules that another model has, or unload some"
                )
            seat = self._seat(verb)
            self._seats[form if rank else f"{form} {id(seat)}"] = seat
        seat.models += 1
        return PolicyModel(self, seat, verb)

    def leave(self, seat: _Seat) -> None:
        """Remove a model; with the last one its policy, too."""
        seat.models -= 1
        if not seat.models:
            self._seats = {form: each for form, each in self._seats.items() if each is not seat}

    def _seat(self, verb: CreateModel) -> _Seat:
        excluded = () if verb.lora_attention and verb.lora_mlp else ATTENTION
        if not verb.lora_mlp:
            excluded = MLP
        changed = {
            "lora_rank": verb.lora_rank or 0,
            "lora_alpha": LORA_ALPHA,
            "use_rslora": False,
            "use_dora": False,
            "target_modules": "all-linear",
            "exclude_modules": excluded,
            "lora_adapter_path": None,
        }
        config = ModelConfig.model_validate({**self._config.model_dump(), **changed})
        hf = open_hf(config.path, trust_remote_code=config.trust_remote_code)
        policy = build_policy(hf, self.world, config)
        trained = {name: p for name, p in policy.hf.named_parameters() if p.requires_grad}
        reader = VisionReader(config.path, policy.hf) if self.images is not None else None
        return _Seat(config, policy, trained, reader)


class PolicyModel(Model):
    """One model: its trained weights, gradients that wait, and AdamW's state."""

    def __init__(self, bench: PolicyBench, seat: _Seat, verb: CreateModel) -> None:
        self._bench, self._seat = bench, seat
        self.form: dict[str, Json] = {
            "lora_rank": verb.lora_rank,
            "lora_attention": verb.lora_attention,
            "lora_mlp": verb.lora_mlp,
            "lora_unembedding": verb.lora_unembedding,
        }
        self.base = seat.policy.base
        parts = {name: _local(parameter) for name, parameter in seat.trained.items()}
        if verb.lora_rank is None:  # the same memory
            self._own = {name: nn.Parameter(part) for name, part in parts.items()}
            seat.taken_by = self
        else:
            self._own = _drawn(parts, verb.lora_seed or 0)
        self._optimizer = torch.optim.AdamW(
            self._own.values(), fused=fused({part.device.type for part in parts.values()})
        )

    def forward_backward(self, request: Pass) -> TrainingResult:
        """Log-probs of all targets, and the loss; gradients are added to those that wait."""
        self._sit()
        policy, rows = self._seat.policy, [each.tokens for each in request.examples]
        keys, numbers = rows, dict[str, int]()
        if reader := self._seat.reader:  # beside other pictures, equal tokens are not alike
            keys = [
                reader.keys(each.tokens, _UNMARKED, each.media, "a row", numbers)
                for each in request.examples
            ]
        outputs: dict[int, Mapping[str, Any]] = {}
        total = 0.0
        try:
            with torch.set_grad_enabled(request.backward):
                for part in cut_alike(keys, self._bench.tokens_at_once, rows_per_laid(policy.hf)):
                    logprobs, loss = self._learn(request, part)
                    total += loss
                    sizes = [len(rows[row]) for row in part]
                    for row, values in zip(part, torch.split(logprobs, sizes), strict=True):
                        outputs[row] = {"logprobs": values.numpy().copy()}
            self._take_gradients()
        finally:
            for parameter in self._seat.trained.values():
                parameter.grad = None
            # A pass without a backward pass leaves the root gathered, in the compute type.
            policy.reshard()  # type: ignore[operator]
        return TrainingResult(
            outputs=[outputs[row] for row in range(len(rows))], metrics={"loss:sum": total}
        )

    def _learn(self, request: Pass, part: Sequence[int]) -> tuple[torch.Tensor, float]:
        """A pack: log-probs float32[N] or [N, K] of its rows' targets, on the CPU, and the loss."""
        examples, device = [request.examples[row] for row in part], self._bench.world.device
        names = examples[0].loss_inputs.keys() - {losses.TARGETS}
        joined = {
            name: torch.from_numpy(
                np.concatenate([each.loss_inputs[name] for each in examples]).astype(np.float32)
            ).to(device)
            for name in sorted(names)
        }
        targets = np.concatenate([each.loss_inputs[losses.TARGETS] for each in examples])
        logprobs = self._logprobs(examples, targets.astype(np.int64))
        lengths = torch.tensor([len(each.tokens) for each in examples], device=device)
        loss = losses.loss_of(request, logprobs, joined, lengths)
        if request.backward:
            loss.backward()  # type: ignore[no-untyped-call]
        return logprobs.detach().cpu(), float(loss.detach())

    def _logprobs(
        self, examples: Sequence[TrainingExample], targets: np.ndarray[Any, Any]
    ) -> torch.Tensor:
        """Log-probs of `targets` at the examples' positions, one after the other; in the shape of `targets`."""
        rows, images = [each.tokens for each in examples], []
        if reader := self._seat.reader:
            images = [
                reader.images(each.tokens, _UNMARKED, each.media, "a row") for each in examples
            ]
        packed = pack(rows, [len(row) for row in rows], images=images)
        wide = targets.reshape(len(targets), -1)
        # What rows share is projected once, too.
        chosen, back = np.unique(
            np.concatenate([packed.layout.places[:, None], wide], axis=1),
            axis=0,
            return_inverse=True,
        )
        packed = dataclasses.replace(
            packed,
            positions=torch.from_numpy(chosen[:, 0].copy()),
            targets=torch.from_numpy(chosen[:, 1].copy()),
            candidates=torch.from_numpy(chosen[:, 2:].copy()) if wide.shape[1] > 1 else None,
        ).to(self._bench.world.device)
        first, _, *others = self._seat.policy(packed, 1.0)
        found = torch.cat([first[:, None], *others], dim=1)
        return found[torch.from_numpy(back.reshape(-1)).to(found.device)].reshape(targets.shape)

    def _take_gradients(self) -> None:
        for name, parameter in self._seat.trained.items():
            if parameter.grad is None:
                continue
            own, gradient = self._own[name], _local(parameter.grad)
            own.grad = gradient if own.grad is None else own.grad.add_(gradient)

    def step(self, request: AdamStep) -> TrainingResult:
        """AdamW; the gradients are gone whatever comes of it."""
        waiting = [parameter for parameter in self._own.values() if parameter.grad is not None]
        if not waiting:
            raise UserError(
                "no gradients wait for an optimizer step; want forward_backward before it"
            )
        norm = float(nn.utils.clip_grad_norm_(waiting, request.grad_clip_norm or math.inf))
        if not math.isfinite(norm):
            self.drop_gradients()
            raise UserError(
                "the gradients were not finite: they are dropped, the weights are as before"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = request.learning_rate
            group["betas"] = (request.beta1, request.beta2)
            group["eps"] = request.eps
            group["weight_decay"] = request.weight_decay
        self._optimizer.step()
        self.drop_gradients()
        if self.form["lora_rank"] is not None:
            self._seat.taken_by = None
        return TrainingResult(metrics={"grad_norm": norm})

    def drop_gradients(self) -> None:
        """None waits."""
        self._optimizer.zero_grad(set_to_none=True)

    def write(self, folder: Path) -> None:
        """Weights, AdamW's state and the gradients that wait."""
        own, states = self._own, self._optimizer.state
        save_file({name: p.detach().contiguous() for name, p in own.items()}, folder / WEIGHTS)
        kept = {
            f"{name}|{key}": value.contiguous()
            for name, parameter in own.items()
            for key, value in states.get(parameter, {}).items()
        }
        save_file(kept, folder / OPTIMIZER)
        waiting = {name: p.grad.contiguous() for name, p in own.items() if p.grad is not None}
        if waiting:
            save_file(waiting, folder / GRADIENTS)

    @torch.no_grad()
    def read(self, folder: Path, *, with_optimizer: bool, with_gradients: bool = False) -> None:
        """Take over what `write` has written; gradients that waited are dropped."""
        stored = load_file(folder / WEIGHTS)
        if {n: w.shape for n, w in stored.items()} != {n: p.shape for n, p in self._own.items()}:
            raise UserError(
                "the checkpoint is of a model of another form; want one of this rank, modules and base"
            )
        for name, parameter in self._own.items():
            parameter.copy_(stored[name])
        self.drop_gradients()
        self._optimizer.state.clear()
        if self.form["lora_rank"] is not None:
            self._seat.taken_by = None
        for label, value in load_file(folder / OPTIMIZER).items() if with_optimizer else ():
            name, _, key = label.rpartition("|")
            parameter = self._own[name]
            on = parameter.device if key != "step" or parameter.is_cuda else "cpu"
            self._optimizer.state[parameter][key] = value.to(on)
        if with_gradients and (folder / GRADIENTS).exists():
            for name, gradient in load_file(folder / GRADIENTS).items():
                self._own[name].grad = gradient.to(self._own[name].device)

    def export(self, folder: Path) -> None:
        """Write the checkpoint that engines load, adapters merged; its folder `adapter` has them for peft."""
        self._sit()
        config, policy, world = self._seat.config, self._seat.policy, self._bench.world
        tokenizer, kind = config.tokenizer_path or config.path, config.param_dtype
        export_policy(policy, world, folder, tokenizer=tokenizer, dtype=kind)
        if self.form["lora_rank"] is not None:
            export_adapter(
                policy, world, folder / "adapter", config, tokenizer=tokenizer, dtype="float32"
            )

    def close(self) -> None:
        """Free its memory."""
        if self._seat.taken_by is self:
            self._seat.taken_by = None
        self._bench.leave(self._seat)

    @torch.no_grad()
    def _sit(self) -> None:
        """Put the adapters into the policy."""
        if self._seat.taken_by is not self:
            for name, parameter in self._seat.trained.items():
                _local(parameter).copy_(self._own[name])
            self._seat.taken_by = self


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor: there is one rank."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def _drawn(parts: Mapping[str, torch.Tensor], seed: int) -> dict[str, nn.Parameter]:
    """Fresh adapters in the shapes of `parts`: A as peft draws it, B 0."""
    draws, drawn = torch.Generator().manual_seed(seed), {}
    for name, part in parts.items():
        whole = torch.zeros(part.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=draws)
        drawn[name] = nn.Parameter(whole.to(part))
    return drawn


def _check_model(verb: CreateModel, names: Sequence[str]) -> None:
    if names and not any(is_called(verb.base_model, name) for name in names):
        raise UserError(f"base model {verb.base_model!r} is not served; want {', '.join(names)}")
    if verb.lora_rank is None:
        return
    if not 1 <= verb.lora_rank <= 1024:
        raise UserError(f"LoRA rank {verb.lora_rank}; want 1 to 1024")
    if not (verb.lora_attention or verb.lora_mlp):
        raise UserError("adapters on neither attention nor MLP; want at least one of them")


def _check_step(verb: AdamStep) -> None:
    least = {"learning_rate": 0.0, "eps": LEAST_EPS, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    for name, lowest in least.items():
        value = getattr(verb, name)
        if not lowest <= value <= MOST_SETTING:
            raise UserError(f"{name} is {value}; want a number from {lowest:g} to {MOST_SETTING:g}")
    for name in ("beta1", "beta2"):
        value = getattr(verb, name)
        if not 0 <= value < 1:
            raise UserError(f"{name} is {value}; want a number from 0 to below 1")
