"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import rlt


def environment(*, with_torch: bool = True) -> dict[str, str | int | None]:
    """The versions and the hardware that a result depends on; None where something is not known.

    `with_torch` False leaves out torch and the GPU, which a client of a remote server has no use for.
    """
    facts: dict[str, str | int | None] = {
        "rlt": rlt.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if with_torch:
        import torch

        facts["torch"] = torch.__version__
        facts["threads"] = torch.get_num_threads()
        facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return facts


def _commit() -> str | None:
    """The commit of the source tree that this package is imported from, marked when files were changed since."""
    root = Path(rlt.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commands = (["git", "rev-parse", "--short=12", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        head, changes = (
            subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-changed" if changes else head


def _cpu_model(path: Path = Path("/proc/cpuinfo")) -> str | None:
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, colon, value = line.partition(":")
            if colon and name.strip() == "model name":
                return value.strip()
    return platform.processor() or None
