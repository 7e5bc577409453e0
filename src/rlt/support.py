"""Which features work together: the table that start-up checks and the README's matrix are made of. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rlt.errors import ConfigError

if TYPE_CHECKING:
    from rlt.config import Config


class Feature(NamedTuple):
    """A feature by its name in the matrix, and the settings that switch it on."""

    name: str
    settings: Mapping[str, Mapping[str, Any]]


LAYOUTS = ("last_exited", "last_exited_copy", "last_step", "cyclic:2", "shared")

FEATURES = (
    Feature("chunked prompts", {"engine": {"prefill_chunk": 4}}),
    Feature("wavefront prompts", {"engine": {"wavefront": True, "prefill_chunk": 4}}),
    Feature("mixed ticks", {"engine": {"mixed": True}}),
    Feature("prompt and decode ticks apart", {"engine": {"mixed": False}}),
    Feature("asynchronous ticks", {"engine": {"async_scheduling": True}}),
    Feature("preemption", {"engine": {"preemption": True}}),
    Feature("admission without preemption", {"engine": {"preemption": False}}),
    Feature("priorities", {"engine": {"scheduling": "priority"}}),
    Feature("prefix cache", {"kv": {"prefix_cache": True}}),
    Feature("exit rule `ouro`", {"exit": {"rule": "ouro"}}),
    Feature("exit rule `ouro_delayed`", {"exit": {"rule": "ouro_delayed"}}),
    Feature("exit rule `random_lookahead`", {"exit": {"rule": "random_lookahead"}}),
    Feature("exit rule `trace`", {"exit": {"rule": "trace", "trace_file": "depths.json"}}),
)


def refusals(config: Config) -> list[str]:
    """Why this configuration cannot run, one line per combination that is not supported."""
    problems = []
    if config.engine.wavefront and config.kv.layout == "shared":
        problems.append(
            "engine.wavefront does not go with kv.layout shared: with one plane for all loops, a prompt token finishes "
            "all its loops before the next one starts"
        )
    return problems


def reason(layout: str, feature: Feature) -> str | None:
    """Why `feature` does not go with `layout`, or None if it does."""
    from rlt.config import load_config

    tree = {section: dict(values) for section, values in feature.settings.items()}
    tree.setdefault("kv", {})["layout"] = layout
    try:
        load_config(overrides=tree)
    except ConfigError as error:
        return str(error)
    return None


def matrix() -> str:
    """The matrix as a Markdown table, with the reasons for each "no" below it."""
    lines = ["| | " + " | ".join(f"`{layout}`" for layout in LAYOUTS) + " |", "|---" * (len(LAYOUTS) + 1) + "|"]
    reasons: dict[str, int] = {}
    for feature in FEATURES:
        cells = []
        for layout in LAYOUTS:
            why = reason(layout, feature)
            cells.append("yes" if why is None else f"no [{reasons.setdefault(why, len(reasons) + 1)}]")
        lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    notes = [f"[{number}] {why}." for why, number in reasons.items()]
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    print(matrix())
