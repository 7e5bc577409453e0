"""`rlt generate`: text from a model in this process, as it comes."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from rlt.cli.options import Assignments, ConfigFile, Device, Dtype, Model, open_llm
from rlt.errors import ConfigError


def generate(
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; - reads it from stdin. May be repeated.")
    ] = None,
    token_ids: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="A prompt as token ids such as 5,9,12. May be repeated.")
    ] = None,
    model: Model = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate (default: what fits).")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy (default: the checkpoint's).")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end of text.")] = False,
    min_loops: Annotated[int | None, typer.Option(min=1)] = None,
    max_loops: Annotated[int | None, typer.Option(min=1, help="Most loops per token.")] = None,
    exit_threshold: Annotated[float | None, typer.Option(min=0, help="1 switches early exit off.")] = None,
    show_depths: Annotated[bool, typer.Option("--show-depths", help="Colour tokens by their exit depth.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Continue a prompt and stream the answer to the terminal."""
    prompts: list[str | list[int]] = [*map(_text, prompt or ()), *map(parse_ids, token_ids or ())]
    if not prompts:
        raise ConfigError(["give a --prompt, or --token-ids for a model without a tokenizer"])
    from rich.console import Console

    from rlt.cli.render import Stream
    from rlt_protocols.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        min_loops=min_loops,
        max_loops=max_loops,
        exit_threshold=exit_threshold,
    )
    llm = open_llm(model, device, dtype, config, assignments)
    try:
        console = Console(highlight=False)
        for one in prompts:
            # One after the other: the terminal has one place where text can grow.
            shown = Stream(console, llm.info.loops, show_depths)
            shown.start()
            for delta in llm.stream([one], params):
                shown.write(delta.text, delta.token_ids, delta.depths)
            shown.finish()
    finally:
        llm.close()


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or spaces. Raises `ConfigError`."""
    words = re.split(r"[,\s]+", text.strip())
    if not all(re.fullmatch(r"\d+", word) for word in words):
        raise ConfigError([f"--token-ids: {text!r} is not a list of token ids such as 5,9,12"])
    return [int(word) for word in words]


def _text(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt
