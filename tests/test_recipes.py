"""The recipes of published checkpoints: configurations that load, and numbers that the code gives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlt.config import load_config
from rlt.models.spec import ModelSpec
from rlt.support import check_model_settings
from rlt.synthetic.make import read_config
from rlt.synthetic.shapes import find_shape
from rltd.check import kv_bytes_per_token, model_size

RECIPES = Path(__file__).parents[1] / "recipes"
#: by folder: the family, and the shape of each configuration
SHAPES = {
    "ouro-1.4b": ("ouro", {"rlt.toml": "1.4b", "thinking.toml": "1.4b"}),
    "ouro-2.6b": ("ouro", {"rlt.toml": "2.6b", "thinking.toml": "2.6b"}),
    "nanbeige4.2-3b": ("nanbeige", {"rlt.toml": "3b", "base.toml": "3b-base"}),
    "huginn-0125": ("huginn", {"rlt.toml": "0125"}),
}
CONFIGS = [(folder, file) for folder, (_, files) in SHAPES.items() for file in files]


def spec_of(folder: str, file: str) -> ModelSpec:
    family, files = SHAPES[folder]
    shape = find_shape(family, files[file])
    return read_config(dict(shape.config) | {"torch_dtype": shape.dtype})


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_there_are_no_others() -> None:
    assert sorted((path.parent.name, path.name) for path in RECIPES.glob("*/*.toml")) == sorted(CONFIGS)


@pytest.mark.parametrize(("folder", "file"), CONFIGS)
def test_a_configuration_goes_with_its_model(folder: str, file: str) -> None:
    config = load_config(RECIPES / folder / file)
    spec = spec_of(folder, file)
    check_model_settings(config, spec)
    length = config.model.max_model_len
    assert length is None or length <= spec.max_positions
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in table.splitlines() if f"({folder}/{file})" in line)
    assert f"`{config.model.path}`" in row
    revision = config.model.revision
    assert row.endswith("| none is known to us |" if revision is None else f"| `{revision}` |")
    assert revision is None or re.fullmatch("[0-9a-f]{40}", revision)


@pytest.mark.parametrize(("folder", "file"), CONFIGS)
def test_the_memory_table_is_what_the_code_says(folder: str, file: str) -> None:
    page = (RECIPES / folder / "README.md").read_text(encoding="utf-8")
    spec = spec_of(folder, file)
    weights = re.search(r"Weights: ([\d,]+) parameters, ([\d,]+) bytes in bfloat16", page)
    assert weights is not None
    parameters = model_size(spec).parameters
    assert [number(cell) for cell in weights.groups()] == [parameters, 2 * parameters]
    rows = dict(re.findall(r"^\| `([a-z_:0-9]+)` \| ([\d,]+ \| [\d,]+) \|$", page, re.MULTILINE))
    assert "last_exited" in rows
    config = load_config()
    possible = kv_bytes_per_token(config, spec, "bfloat16").keys() - {"one_loop", "outside_loops"}
    assert possible <= rows.keys()
    for layout, cells in rows.items():
        asked = replace(config, kv=replace(config.kv, layout=layout))
        size = kv_bytes_per_token(asked, spec, "bfloat16")[layout]
        assert [number(cell) for cell in cells.split(" | ")] == [size, 2**30 // size]
