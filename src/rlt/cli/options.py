"""Options that several commands share, and the model that they open."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlt.llm import LLM

Model = Annotated[
    str | None, typer.Option(help="Built-in model, directory or Hub id (default: tiny-ouro, or the config's).")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:INDEX (default: the first GPU, else cpu).")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16 or float32 (default: auto).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file, as rltd takes it.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Seed = Annotated[int, typer.Option(help="Seed of the examples.")]


def command_line(arguments: Sequence[str]) -> str:
    """The command that a result came from, without keys: results are kept and shown."""
    words = ["rlt"]
    for word in arguments:
        hidden = "..." if words[-1] == "--api-key" else word
        words.append("--api-key=..." if word.startswith("--api-key=") else hidden)
    return shlex.join(words)


def open_llm(
    model: str | None, device: str | None, dtype: str | None, config: Path | None, assignments: list[str] | None
) -> LLM:
    """The model that the shared options name; shows how far it is loaded. Raises `RltError`."""
    from rlt.config import load_config

    settings = load_config(config, assignments=assignments or ())
    from rlt.cli.loading import loading
    from rlt.llm import LLM

    with loading() as progress:
        return LLM(model, device=device, dtype=dtype, config=dataclasses.asdict(settings), progress=progress)
