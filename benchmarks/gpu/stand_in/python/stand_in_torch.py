"""Torch's own operations on the stand-in's GPU, computed by the CPU: a `.pth` file imports this at Python's start.

Memory of that GPU is memory of the process, so a tensor there is a tensor of the CPU, too, without a copy: each
operation that both have a kernel for gets the CPU's. So counts, masks, digests and losses are true, and a trainer or
a check of weights goes on as on a GPU. What torch's dispatcher does not reach still does nothing: kernels of Triton,
of extensions, of flash attention.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

KEPT = (
    "_local_scalar_dense",
    "_reshape_alias",
    "as_strided",
    "empty",
    "is_pinned",
    "pin_memory",
    "record_stream",
    "resize_",
    "set_",
    "unfold",
    "view",
)
"""How names begin of operations that are the device's own: they make tensors and move bytes, and compute nothing."""
COPY = "aten::copy_"
"""An operation with one kernel for all devices; only copies of whole blocks would work."""


class AfterTorch(MetaPathFinder, Loader):
    """Replaces the operations when torch is imported for the first time."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module as others find it, with this as its loader: whoever asks may not import it."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            found = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if found is not None and found.loader is not None:
            self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As for any other module."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run torch, then replace."""
        sys.meta_path.remove(self)
        self.loader.exec_module(module)
        replace_operations(module)


def replace_operations(torch: Any) -> None:
    """Register each operation's kernel of the CPU for the GPU, where both have one."""
    library = torch.library.Library("aten", "IMPL")
    on_gpu = torch._C._dispatch_has_kernel_for_dispatch_key
    on_any = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in torch._C._dispatch_get_all_op_names():
            space, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            if space != "aten" or base.startswith(KEPT):
                continue
            if name == COPY or (on_gpu(name, "CUDA") and on_any(name, "CPU")):
                operation = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(rest, computed_by_cpu(torch, operation), "CUDA")
    torch._stand_in_library = library  # what it registers goes with it


def computed_by_cpu(torch: Any, operation: Any) -> Any:
    """A kernel for tensors of the GPU: the operation of the same memory, as tensors of the CPU."""
    tree = torch.utils._pytree
    wants_tensor = [str(each.type) == "Tensor" for each in operation._schema.arguments]

    def overload(arguments: tuple[Any, ...]) -> Any:
        """The one for these arguments: what torch made a tensor of, in `x & 5`, arrives as the number that it was."""
        for value, wanted in zip(arguments, wants_tensor, strict=False):
            if wanted and isinstance(value, int | float | complex):
                return operation.overloadpacket
        return operation

    def shared(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return same_memory(torch, value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def kernel(*arguments: Any, **named: Any) -> Any:
        given, form = tree.tree_flatten((arguments, named))
        theirs = [shared(value) for value in given]
        arguments, named = tree.tree_unflatten(theirs, form)
        results, form = tree.tree_flatten(overload(arguments)(*arguments, **named))
        pairs = list(zip(given, theirs, strict=True))
        for ours, other in pairs:
            # An empty tensor that was to take the result is as large as the result now.
            if isinstance(ours, torch.Tensor) and ours.shape != other.shape:
                ours.resize_(other.shape)
                same_memory(torch, ours).copy_(other)
        return tree.tree_unflatten([on_gpu(result, pairs) for result in results], form)

    def on_gpu(result: Any, pairs: list[tuple[Any, Any]]) -> Any:
        for ours, other in pairs:
            if result is other:
                return ours
        if not isinstance(result, torch.Tensor):
            return result
        shape, strides = result.shape, result.stride()
        made = torch.empty_strided(shape, strides, dtype=result.dtype, device="cuda")
        same_memory(torch, made).copy_(result)
        return made

    return kernel


def same_memory(torch: Any, tensor: Any) -> Any:
    """The tensor of the CPU that is one of the GPU."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype)
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(shape, strides)


if hasattr(ctypes.CDLL(None), "gpu_code_in"):  # the stand-in is loaded
    sys.meta_path.insert(0, AfterTorch())
