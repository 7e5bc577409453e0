"""What the documents list is what there is: configuration keys, request fields, metrics, error codes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import msgspec
import pytest

from rlt.config import SECTIONS
from rlt_protocols.openai import OFF, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from rltd.frontend.metrics import Metrics

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def rows(page: str) -> dict[str, list[str]]:
    """Cells of a page's table rows by what stands in backticks in their first cell."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[1:])
    return found


def test_every_configuration_key_and_its_default() -> None:
    documented = {name: cells[0] for name, cells in rows("configuration.md").items() if "." in name}
    keys = {
        f"{section}.{key.name}": "–" if key.default is None else f"`{json.dumps(key.default)}`"
        for section, cls in SECTIONS.items()
        for key in dataclasses.fields(cls)
    }
    assert documented == keys


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_every_request_field(kind: type[msgspec.Struct]) -> None:
    names = {field.name for field in msgspec.structs.fields(kind)}
    assert names - rows("http-api.md").keys() == set()


def test_no_field_that_is_not_served() -> None:
    fields = {field.name for kind in (CompletionRequest, ChatRequest) for field in msgspec.structs.fields(kind)}
    assert not (OFF.keys() & rows("http-api.md").keys()) - fields - {"add_generation_prompt", "add_special_tokens"}


def test_every_metric() -> None:
    names = {line.split()[2] for line in Metrics().render().decode().splitlines() if line.startswith("# TYPE ")}
    assert names == {name for name in rows("http-api.md") if name.startswith("rlt:")}


def test_every_error_code() -> None:
    codes = {
        code
        for file in (ROOT / "proc" / "rltd" / "frontend").glob("*.py")
        for code in re.findall(r'code="([a-z_]+)"|unavailable\([^)]*"([a-z_]+)", RESTART', file.read_text())
        for code in code
        if code
    }
    assert codes
    assert codes - rows("http-api.md").keys() == set()
