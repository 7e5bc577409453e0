"""The direction of dependence, and that what must stay light does: found in the imports, not in conventions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "rlt_protocols": ROOT / "protocols" / "rlt_protocols",
    "rlt": ROOT / "src" / "rlt",
    "rltd": ROOT / "proc" / "rltd",
}

#: Whose modules a package may import, of the three.
MAY_IMPORT = {
    "rlt_protocols": {"rlt_protocols"},
    "rlt": {"rlt_protocols", "rlt"},
    "rltd": {"rlt_protocols", "rlt", "rltd"},
}

#: Packages and modules that never import torch, nor anything that does.
TORCH_FREE = (
    "rlt_protocols",
    "rlt.config",
    "rlt.errors",
    "rlt.support",
    "rlt.sched",
    "rlt.kv.pages",
    "rlt.text",
    "rlt.models.checkpoint",
    "rlt.models.directory",
    "rlt.models.families",
    "rlt.models.spec",
    "rltd.cli",
    "rltd.frontend",
    "rltd.detokenizer",
    "rltd.supervisor",
    "rltd.control",
    "rltd.link",
    "rltd.main",
)


def imports_of(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a module is"
            assert node.module is not None
            yield node.module


def modules(name: str) -> list[str]:
    """A module's name, or the names of all modules of a package."""
    package, *below = name.split(".")
    place = SOURCES[package].joinpath(*below)
    if not place.is_dir():
        return [name]
    files = [file.relative_to(SOURCES[package]).with_suffix("") for file in place.rglob("*.py")]
    return sorted(".".join((package, *file.parts)).removesuffix(".__init__") for file in files)


@pytest.mark.parametrize("package", SOURCES)
def test_dependence_points_one_way(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in SOURCES[package].rglob("*.py")
        for module in imports_of(file)
        if (first := module.partition(".")[0]) in SOURCES and first not in MAY_IMPORT[package]
    ]
    assert wrong == []


def test_light_modules_import_no_torch() -> None:
    names = [module for name in TORCH_FREE for module in modules(name)]
    assert "rltd.frontend.app" in names
    code = f"""
import importlib, sys
sys.modules["torch"] = None  # importing it is an ImportError now
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
