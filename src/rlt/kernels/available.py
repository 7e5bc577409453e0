"""Whether the kernels can run somewhere, and what they must know of a device. Imports neither torch nor Triton."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: By type of device. On a CPU it is Triton's interpreter, whose products of bfloat16 matrices are wrong.
DTYPES = {"cuda": ("float32", "bfloat16", "float16"), "cpu": ("float32",)}

_LEAST_CAPABILITY = (8, 0)
#: what is planned for where there is no device to ask, as in the interpreter
_INTERPRETED_MULTIPROCESSORS = 4


def obstacle(device: str, dtype: str | None = None) -> str | None:
    """Why the kernels cannot run on a device of this type ("cpu" or "cuda"), with `dtype` if it is known; or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it is in the extra `gpu`, for Linux)"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "kernels are compiled for GPUs; on a CPU they run in Triton's interpreter only, for tests, with "
            "TRITON_INTERPRET=1 in the environment"
        )
    if dtype is not None and dtype not in DTYPES[device]:
        return f"on a device of type {device} the kernels do not compute in {dtype}"
    return None


def obstacle_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """The same of a device that is there."""
    why = obstacle(device.type, str(dtype).removeprefix("torch."))
    if why is None and device.type == "cuda":
        import torch

        found = torch.cuda.get_device_capability(device)
        if found < _LEAST_CAPABILITY:
            least, have = (".".join(map(str, version)) for version in (_LEAST_CAPABILITY, found))
            why = f"the kernels need a GPU of compute capability {least} or more, and this one has {have}"
    return why


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    import torch

    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
