"""The embedded engine: a decoder in plain torch, with weights, cache, forward pass, sampling and batch of its own."""

from meshrl.rollout.config import TorchEngineConfig as Config
from meshrl.rollout.engines.torch.engine import TorchEngine, build

__all__ = ["Config", "TorchEngine", "build"]
