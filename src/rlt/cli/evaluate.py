"""`rlt eval`: how often a model answers right, and how that depends on the number of loops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt.cli.options import Assignments, ConfigFile, Device, Dtype, Json, Model, Seed, open_llm
from rlt.errors import ConfigError

if TYPE_CHECKING:
    from rlt.evals.tasks import Example
    from rlt.llm import LLM

app = typer.Typer(
    no_args_is_help=True, help="Accuracy on tasks with checkable answers.", pretty_exceptions_enable=False
)

#: Longer than any right answer with its end-of-text token.
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Score:
    """How one setting did: which examples were right, and the mean loops of its output tokens."""

    right: tuple[bool, ...]
    mean_loops: float

    @property
    def exact_match(self) -> float:
        return sum(self.right) / len(self.right)


@app.callback()
def _group() -> None:
    pass


@app.command()
def tasks(
    *,
    model: Model = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Examples per task.")] = 200,
    seed: Seed = 0,
    thresholds: Annotated[
        str, typer.Option(help="Exit thresholds to compare, separated by commas.")
    ] = "0.3,0.5,0.7,0.9",
    device: Device = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Exact match on the built-in tasks' held-out wording: at the model's defaults, per depth and per threshold."""
    from rlt.bench import environment
    from rlt.evals.tasks import examples

    levels = parse_thresholds(thresholds)
    llm = open_llm(model, device, dtype, config, assignments)
    try:
        result = {**evaluate(llm, list(examples("heldout", n, seed)), levels), "env": environment()}
    finally:
        llm.close()
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)


def parse_thresholds(text: str) -> list[float]:
    """Numbers from 0 to 1 out of a comma-separated list. Raises `ConfigError`."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError([f"--thresholds: {text!r} is not a list of numbers such as 0.5,0.9"]) from error
    if not all(0 <= value <= 1 for value in values):
        raise ConfigError([f"--thresholds: {text!r} must be numbers from 0 to 1"])
    return values


def evaluate(llm: LLM, examples: Sequence[Example], thresholds: Sequence[float]) -> dict[str, Any]:
    """The evaluation's JSON structure, without the environment.

    `by_loops` runs every token m loops deep (no early exit); `by_threshold` lets tokens exit early, up to full depth.
    A model of fixed depth has one number of loops and no thresholds.
    """
    default = score(llm, examples)
    names = dict.fromkeys(example.task for example in examples)
    by_task = {name: [ok for ok, e in zip(default.right, examples, strict=True) if e.task == name] for name in names}
    loops, fixed = llm.info.loops, llm.info.full_depth is not None
    depths = {str(m): score(llm, examples, max_loops=m, threshold=1.0) for m in range(loops if fixed else 1, loops + 1)}
    exits = {f"{q:g}": score(llm, examples, max_loops=loops, threshold=q) for q in thresholds if not fixed}
    return {
        "model": llm.info.name,
        "tasks": {name: {"n": len(right), "exact_match": sum(right) / len(right)} for name, right in by_task.items()},
        "exact_match": default.exact_match,
        "mean_loops": default.mean_loops,
        "by_loops": {m: result.exact_match for m, result in depths.items()},
        "by_threshold": {
            q: {"exact_match": result.exact_match, "mean_loops": result.mean_loops} for q, result in exits.items()
        },
    }


def score(
    llm: LLM, examples: Sequence[Example], *, max_loops: int | None = None, threshold: float | None = None
) -> Score:
    """Answer all examples greedily in the raw completion form; None leaves a limit at the model's default."""
    from rlt_protocols.params import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stop=("\n",),
        max_loops=max_loops,
        min_loops=None if max_loops is None or llm.info.full_depth is not None else 1,
        exit_threshold=threshold,
    )
    outputs = [output.outputs[0] for output in llm.generate([example.prompt for example in examples], params)]
    right = tuple(o.text.strip() == example.answer for o, example in zip(outputs, examples, strict=True))
    depths = [depth for output in outputs for depth in output.depths]
    return Score(right, sum(depths) / len(depths))


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    tasks = Table("task", "n", "exact match", title=f"{result['model']}: held-out tasks")
    for name, row in result["tasks"].items():
        tasks.add_row(name, str(row["n"]), f"{row['exact_match']:.1%}")
    total = sum(row["n"] for row in result["tasks"].values())
    tasks.add_row("all", str(total), f"{result['exact_match']:.1%}", style="bold")
    console.print(tasks)
    depth = Table("setting", "exact match", "mean loops", title="depth")
    depth.add_row("model's default", f"{result['exact_match']:.1%}", f"{result['mean_loops']:.2f}")
    for loops, accuracy in result["by_loops"].items():
        depth.add_row(f"max_loops {loops}", f"{accuracy:.1%}", f"{float(loops):.2f}")
    for threshold, row in result["by_threshold"].items():
        depth.add_row(f"threshold {threshold}", f"{row['exact_match']:.1%}", f"{row['mean_loops']:.2f}")
    console.print(depth)
