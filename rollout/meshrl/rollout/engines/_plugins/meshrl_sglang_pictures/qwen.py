"""Gives an SGLang server the pixels of pictures as the trainer has them, where its own processor would make others.

This file runs inside SGLang's own environment, where meshrl is not installed. The server imports it when
SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE names its folder, which is on PYTHONPATH. Over HTTP SGLang takes texts and files,
so what its Python engine takes as tensors (`processor_output`) comes as one JSON text, for all pictures of a request.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor


class Pixels(QwenVLImageProcessor):  # type: ignore[misc]
    """Takes what `meshrl.rollout.server_engine.sglang_messages.image_data` made, and nothing else."""

    models = QwenVLImageProcessor.models

    async def process_mm_data_async(
        self, image_data: list[Any], input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Raises ValueError for pictures that come in another form, which the server answers with 400."""
        if image_data:
            image_data = [_tensors(each) for each in image_data]
        return await super().process_mm_data_async(
            image_data, input_text, request_obj, *args, **kwargs
        )


def _tensors(text: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
        made = {name: _tensor(*value) for name, value in found.pop("tensors").items()}
        return {"format": "processor_output", **found, **made}
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise ValueError(f"meshrl_sglang_pictures: no pixels ({error!r:.200})") from error


def _tensor(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    raw = bytearray(base64.b64decode(data))
    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(shape)
