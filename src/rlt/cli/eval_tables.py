"""What `rlt eval` shows to people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_tasks(result: dict[str, Any]) -> None:
    """The result of `rlt eval tasks`."""
    console = Console()
    tasks = Table("task", "n", "exact match", title=f"{result['model']}: held-out tasks")
    for name, row in result["tasks"].items():
        tasks.add_row(name, str(row["n"]), _percent(row["exact_match"]))
    total = sum(row["n"] for row in result["tasks"].values())
    tasks.add_row("all", str(total), _percent(result["exact_match"]), style="bold")
    console.print(tasks)
    depth = Table("setting", "exact match", "mean loops", title="depth")
    depth.add_row("model's default", _percent(result["exact_match"]), _loops(result))
    for loops, accuracy in result["by_loops"].items():
        depth.add_row(f"{loops} loop{'' if loops == '1' else 's'}", _percent(accuracy), f"{float(loops):.2f}")
    for threshold, row in result["by_threshold"].items():
        depth.add_row(f"threshold {threshold}", _percent(row["exact_match"]), _loops(row))
    console.print(depth)
    for name, why in result.get("absent", {}).items():
        console.print(f"{name}: {why}", markup=False, highlight=False)


def print_gsm8k(result: dict[str, Any]) -> None:
    """The result of `rlt eval gsm8k`."""
    settings = result["settings"]
    title = f"{result['model']}: GSM8K, {result['n']} questions, {settings['shots']} shots, {settings['form']} form"
    table = Table("", "exact match", "standard error", title=title)
    for name, key in (("strict match (####)", "strict_match"), ("flexible extract (last number)", "flexible_extract")):
        table.add_row(name, _percent(result[key]["exact_match"]), _percent(result[key]["stderr"]))
    console = Console()
    console.print(table)
    parts = [f"{result['no_strict_answer']} answers without a strict number"]
    parts += [f"{count} ended by {reason}" for reason, count in result["finish_reasons"].items()]
    if "mean_tokens" in result:
        parts.append(f"{result['mean_tokens']:.1f} tokens per answer")
    if "mean_loops" in result:
        parts.append(f"{result['mean_loops']:.2f} loops per token")
    console.print(", ".join(parts), highlight=False)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _loops(row: dict[str, Any]) -> str:
    return f"{row['mean_loops']:.2f}" if "mean_loops" in row else "–"
