"""The policy: a Hugging Face causal language model under FSDP2 that reads packs and answers with log-probs.

    pack ──▶ decoder (block-diagonal attention) ──▶ hidden[response positions] ──▶ linear_logprob ──▶ [N]

Master weights are float32; `param_dtype` is what matmuls run in. The projection happens inside the root module's
forward, so that FSDP has the output embedding gathered there, and only response positions are projected.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import Json
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model import attention, lora
from meshrl.trainer.model.attention import take_falcon
from meshrl.trainer.model.checkpoint_names import Published, in_checkpoint
from meshrl.trainer.model.logprob import (
    VocabularyShare,
    linear_argmax,
    linear_logprob,
    linear_sum_pi_squared,
    linear_top,
)
from meshrl.trainer.model.lora import BaseModel
from meshrl.trainer.model.packing import Pack
from meshrl.trainer.model.packing_check import Alone, HfModel, Packed, fault, first_line
from meshrl.trainer.model.routing import Routing, RoutingReplay
from meshrl.trainer.model.sharding import can_fill, check_heads, decoder_layers, shard
from meshrl.trainer.model.untrainable import WANTED, refusal
from meshrl.trainer.model.vision import (
    VISION_ATTENTION,
    embedded,
    tower_of,
    tower_prefix,
)
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)

_faults: dict[tuple[type, str], str] = {}
"""Findings of `packing_fault` by class and configuration: a policy's reference and critic are mostly of the same."""


class Policy(nn.Module):
    """Log-probs and entropies of the response tokens of a pack."""

    def __init__(
        self,
        hf: HfModel,
        adapter: dict[str, Json] | None = None,
        base: str | None = None,
        stored: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.hf = hf
        self.adapter = adapter
        """LoRA's settings (`lora.describe`); None when every weight is trained."""
        self.base = base
        """Fingerprint of the checkpoint that others can merge the adapter into; None where they cannot."""
        self._stored = stored
        self._replay: RoutingReplay | None = None
        self.tower = tower_of(hf)
        """Vision tower; None in a model of text."""

    def forward(self, pack: Pack, temperature: float) -> tuple[torch.Tensor, ...]:
        """Returns logprobs float32[N] and entropies float32[N] for the N response tokens.

        Third, if the pack has candidates, their log-probs float32[N, k].
        """
        targets = pack.targets
        if pack.candidates is not None:
            targets = torch.cat([targets[:, None], pack.candidates], dim=1)
        hidden = self._response_hidden(pack)
        weight, share = self._head()
        logprobs, entropies = linear_logprob(
            hidden, weight, targets, **self._logits(temperature), share=share
        )
        if pack.candidates is None:
            return pack.joined(logprobs), pack.joined(entropies)
        joined = pack.joined(logprobs)
        # Copies: FSDP's backward hook would be lost by an operation in place on a view.
        return joined[:, 0].clone(), pack.joined(entropies), joined[:, 1:].clone()

    def top(self, pack: Pack, temperature: float, count: int) -> tuple[torch.Tensor, ...]:
        """Logprobs float32[N]; then the `count` likeliest tokens, int32[N, k] and float32[N, k]. No gradient."""
        hidden, weight = self._response_hidden(pack), self.hf.get_output_embeddings().weight
        how = self._logits(temperature)
        found = [linear_logprob(hidden, weight, pack.targets, **how)[0]]
        if count:
            ids, logprobs = linear_top(hidden, weight, count, **how)
            found += [ids.to(torch.int32), logprobs]
        return tuple(pack.joined(values) for values in found)

    def is_greedy(self, pack: Pack) -> torch.Tensor:
        """bool[N]: is each response token the one that greedy decoding would take? For teacher forcing."""
        hidden = self._response_hidden(pack)
        weight, share = self._head()
        right = linear_argmax(hidden, weight, share=share) == pack.targets
        return pack.joined(right.to(torch.uint8)).bool()

    def sum_pi_squared(self, pack: Pack, temperature: float) -> torch.Tensor:
        """float32[N]: Σ_v π(v)² where each response token was sampled. No gradient."""
        hidden = self._response_hidden(pack)
        weight, share = self._head()
        squares = linear_sum_pi_squared(hidden, weight, **self._logits(temperature), share=share)
        return pack.joined(squares)

    def _head(self) -> tuple[torch.Tensor, VocabularyShare | None]:
        """The output embedding; where ranks share it, this rank's rows and which they are. Inside a forward."""
        weight: torch.Tensor = self.hf.get_output_embeddings().weight
        if not isinstance(weight, DTensor):
            return weight, None
        local, mesh = weight.to_local(), weight.device_mesh
        first = mesh.get_local_rank() * len(local)
        return local, VocabularyShare(group=mesh.get_group(), first=first)

    def _logits(self, temperature: float) -> dict[str, Any]:
        """How logits are made of the projection: Granite divides them, Cohere multiplies them, Gemma 2 caps them."""
        config = self.hf.config
        divisor = getattr(config, "logits_scaling", None) or 1.0
        factor = getattr(config, "logit_scale", None) or 1.0
        return {
            "temperature": temperature * divisor / factor,
            "softcap": getattr(config, "final_logit_softcapping", None),
        }

    def replay_routing(self) -> Routing:
        """Send tokens of packs that have `experts` to these from here on.

        Raises:
            UserError: the model has no router that can be told.
        """
        self._replay = self._replay or RoutingReplay(self.hf, decoder_layers(self.hf))
        return self._replay.routing

    def _response_hidden(self, pack: Pack) -> torch.Tensor:
        if self._replay is not None:
            self._replay.experts = pack.experts
        return response_hidden(self.hf, pack)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters as they are trained, in layer order; a tied one comes once, under its first name."""
        yield from self.hf.named_parameters()

    def named_weights(self) -> Iterator[tuple[str, lora.Weight]]:
        """Names and weights as transformers holds them: adapters merged."""
        yield from lora.weights(self.hf)

    def published_weights(self, *, frozen: bool = False) -> Iterator[tuple[str, Published]]:
        """The weights as engines load them, adapters merged, under the names of a checkpoint; with its buffers.

        Those of a `frozen` vision tower, which engines have from their checkpoint, only if asked for.
        """
        given = self.named_weights() if frozen else self._changing_weights()
        yield from in_checkpoint(self.hf, given, self._stored)
        buffers = ((name, lora.Weight(buffer)) for name, buffer in self.hf.named_buffers())
        for name, weight in in_checkpoint(self.hf, buffers, self._stored):
            if name in self._stored:
                yield name, weight

    def _changing_weights(self) -> Iterator[tuple[str, lora.Weight]]:
        """The weights that training changes: a frozen tower's are in each engine's checkpoint."""
        frozen = self.tower is not None and not any(
            parameter.requires_grad for parameter in self.tower.parameters()
        )
        for name, weight in self.named_weights():
            if not (frozen and name.startswith(tower_prefix(self.hf))):
                yield name, weight

    def named_adapters(self) -> Iterator[tuple[str, lora.Weight]]:
        """A and B of each module that has an adapter."""
        yield from lora.adapters(self.hf)


def response_hidden(hf: HfModel, pack: Pack) -> torch.Tensor:
    """[N, H]: the hidden states that predict a response token (of this rank's share: see `Pack.joined`)."""
    read = {"input_ids": pack.input_ids}
    if tower_of(hf) is not None:
        read = embedded(hf, pack.input_ids, pack.images)
    return decoder_hidden(hf.get_decoder(), pack, read)


def decoder_hidden(decoder: HfModel, pack: Pack, read: dict[str, Any]) -> torch.Tensor:
    """The result of `response_hidden`, by a decoder that is given `read`."""
    before = attention.calls()
    hidden: torch.Tensor = decoder(
        **read,
        position_ids=attention.carrying(pack.position_ids, pack.layout),
        attention_mask=None,
        use_cache=False,
        packed_layout=pack.layout,
    ).last_hidden_state[0]
    if attention.calls() == before:
        raise UserError(
            f"the attention of {type(decoder).__name__} does not go through transformers' attention interface: rows"
            " of a pack would see each other"
        )
    return hidden.index_select(0, pack.positions)


def open_hf(
    path: Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> HfModel:
    """Open a model on the meta device: `shard` then gives each rank its shards of the weights only.

    Where the weights cannot be read by shards they are there already.
    """
    if not can_fill(path):
        return load_hf(path, dtype, trust_remote_code=trust_remote_code)
    return _loaded(path, _empty, dtype, trust_remote_code)


def load_hf(
    path: Path, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> HfModel:
    """A model from a Hugging Face checkpoint directory, ready for packed attention.

    Raises:
        UserError: the directory is not such a checkpoint, or the model cannot be trained here.
    """
    return _loaded(path, _whole, dtype, trust_remote_code)


def _loaded(path: Path, load: Callable[..., HfModel], dtype: torch.dtype, trust: bool) -> HfModel:
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path: no config.json in {path}: not a Hugging Face checkpoint directory"
        )
    try:
        config = json.loads((path / "config.json").read_text())
        refuse(path, refusal(config))
        if trust and "auto_map" in config:
            log.warning(
                "model.trust_remote_code: %s runs Python files of its own, as this user, in every process that loads"
                " it",
                path,
            )
        hf = load(path, dtype=dtype, trust_remote_code=trust)
    except MeshError:
        raise
    except Exception as error:  # transformers and the code of a model raise whatever they like
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            reason = (
                "its architecture is Python code of its own, which you must have read: want"
                " model.trust_remote_code: true"
            )
        raise UserError(f"model.path: cannot load {path}: {reason}") from error
    return _prepared(hf, path)


def _whole(path: Path, **how: Any) -> HfModel:
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=how["trust_remote_code"])
    factory, kernels = _class_of(config)
    return factory.from_pretrained(path, attn_implementation=kernels, **how)


def _empty(path: Path, **how: Any) -> HfModel:
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=how["trust_remote_code"])
    return empty_hf(config, **how)


def empty_hf(config: Any, **how: Any) -> HfModel:
    """A model of a transformers configuration, on the meta device."""
    factory, kernels = _class_of(config)
    with torch.device("meta"):
        return factory.from_config(config, attn_implementation=kernels, **how)


def random_hf(config: Any, seed: int) -> HfModel:
    """A float32 model with weights drawn from `seed`; `config` is a transformers config.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory, kernels = _class_of(config)
        hf = factory.from_config(config, dtype=torch.float32, attn_implementation=kernels)
    return _prepared(hf, Path(config.name_or_path or config.model_type))


def _class_of(config: Any) -> tuple[Any, Any]:
    """Transformers' factory of a model, and which attention its parts compute; pictures are never packed."""
    if config.model_type == "falcon":
        take_falcon()
    if getattr(config, "vision_config", None) is None:
        return AutoModelForCausalLM, attention.NAME
    kernels = {"text_config": attention.NAME, "vision_config": VISION_ATTENTION}
    return AutoModelForImageTextToText, kernels


def _prepared(hf: HfModel, path: Path) -> HfModel:
    """Refuse what would make log-probs differ from the sampler's; switch off what is drawn while a model trains."""
    refuse(path, refusal(hf.config.to_dict()) or packing_fault(*what_to_try(hf)))
    return as_trained(hf)


def refuse(path: Path, why: str) -> None:
    """Raise UserError if there is a reason."""
    if why:
        raise UserError(f"model {path}: {why}; {WANTED}")


def what_to_try(hf: HfModel) -> tuple[Any, Any, Packed, Alone]:
    """Class and configuration of what computes on tokens, and how its numbers are read in packs and of rows alone."""
    if tower_of(hf) is None:
        return type(hf), hf.config, _logprobs, _own_logprobs
    return type(hf.get_decoder()), hf.config.get_text_config(), _hidden, _own_hidden


def packing_fault(kind: Any, config: Any, packed: Packed, alone: Alone) -> str:
    """Why a model of a class and a configuration cannot be trained, as a small random copy shows it; mostly empty."""

    def build(config: Any, ours: bool) -> HfModel:
        kernels = attention.NAME if ours else "eager"
        hf = kind._from_config(config, dtype=torch.float32, attn_implementation=kernels)
        return as_trained(hf) if ours else hf

    key = (kind, config.to_json_string())
    if key not in _faults:
        _faults[key] = fault(config, build, packed, alone)
    return _faults[key]


def as_trained(hf: HfModel) -> HfModel:
    """Let each row of a pack begin without a state; switch off dropout, and the noise in front of routers."""
    attention.split_rows(hf)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
                setattr(module, name, 0.0)
    return hf


def _logprobs(hf: HfModel, pack: Pack) -> torch.Tensor:
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise UserError("the output embedding has a bias, which is not supported")
    decoder_layers(hf)
    logprobs: torch.Tensor = Policy(hf)(pack, 1.0)[0]
    return logprobs


def _own_logprobs(hf: HfModel, row: torch.Tensor) -> torch.Tensor:
    logprobs: torch.Tensor = hf(input_ids=row, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, row[0, 1:, None])[:, 0]


def _hidden(decoder: HfModel, pack: Pack) -> torch.Tensor:
    return decoder_hidden(decoder, pack, {"input_ids": pack.input_ids})


def _own_hidden(decoder: HfModel, row: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = decoder(input_ids=row, use_cache=False).last_hidden_state[0, :-1]
    return hidden


def build_policy(hf: HfModel, world: World, config: ModelConfig) -> Policy:
    """Shard the model over the ranks: one FSDP unit per decoder layer, the rest in the root's.

    Raises:
        UserError: LoRA is asked for on modules that the model has not.
    """
    check_heads(hf, world)
    policy = shard(_unsharded(hf, world, config).train(), hf, world, config)
    for method in ("is_greedy", "sum_pi_squared"):
        register_fsdp_forward_method(policy, method)
    return policy


def _unsharded(hf: HfModel, world: World, config: ModelConfig) -> Policy:
    """Policy with adapters in place. They merge into the same base elsewhere, if its tensors have the same names."""
    try:
        base = BaseModel(config.path)
    except UserError:  # transformers reads formats that the weight plane does not
        base = None
    stored = base.names if base else frozenset()
    if not config.lora_rank:
        return Policy(hf, stored=stored)
    lora.add_adapter(hf, config)
    if base is None:
        return Policy(hf, lora.describe(config, None))
    # It is of every byte: one rank reads them.
    fingerprint = world.broadcast(base.fingerprint.encode() if world.is_main else b"").decode()
    adapter = lora.describe(config, fingerprint)
    published = dict(in_checkpoint(hf, lora.weights(hf), stored))
    shared = all(base.has(name, weight.shape) for name, weight in published.items()) and all(
        f"{target}.weight" in published for target in lora.targets(hf)
    )
    return Policy(hf, adapter, fingerprint if shared and not config.use_dora else None, stored)
