"""The smallest legal body of `/update_weights_from_tensor`: one empty tensor, whose name says where a version is.

SGLang wants a pickle there, one a tensor-parallel rank, and reads it with an unpickler that knows a list of harmless
names. This is eight opcodes written by hand, so that nothing of ours is ever pickled or unpickled: the list
`[(name, torch.Tensor())]`. (SGLang 0.5.23, `srt/utils/common.py`: `SafeUnpickler.ALLOWED_GLOBALS`.)
"""

from __future__ import annotations

import base64
import struct

_PROTOCOL_2_EMPTY_LIST = b"\x80\x02]"
_TEXT = b"X"
_TORCH_TENSOR_CALLED = b"ctorch\nTensor\n)R"
_PAIR_APPEND_STOP = b"\x86a."


def named_empty_tensor(name: str) -> str:
    """Base64 of the pickle of `[(name, torch.Tensor())]`."""
    text = name.encode()
    body = _PROTOCOL_2_EMPTY_LIST + _TEXT + struct.pack("<I", len(text)) + text
    return base64.b64encode(body + _TORCH_TENSOR_CALLED + _PAIR_APPEND_STOP).decode()
