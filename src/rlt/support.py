"""Which features work together: the table that start-up checks and the README's matrix are made of. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rlt.errors import ConfigError
from rlt.kv.layout import parse_layout
from rlt.models.families import FAMILIES

if TYPE_CHECKING:
    from rlt.config import Config
    from rlt.models.spec import ModelSpec


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

#: What a family may exclude; every other feature goes with all of them.
FAMILY_FEATURES = (
    *(Feature(f"layout `{layout}`", {"kv": {"layout": layout}}) for layout in LAYOUTS),
    *(feature for feature in FEATURES if "exit" in feature.settings),
    Feature("early exit by threshold", {"exit": {"threshold": 0.9}}),
    Feature("fewer loops than trained", {"exit": {"max_loops": 1}}),
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


def check_model_settings(config: Config, spec: ModelSpec) -> None:
    """Raise `ConfigError` with a line for each setting that a model of this shape and family cannot follow."""
    problems, exits = [], config.exit
    if (config.model.max_model_len or 0) > spec.max_positions:
        problems.append(
            f"model.max_model_len {config.model.max_model_len} is more than the model's {spec.max_positions} positions"
        )
    for key, loops in (("exit.min_loops", exits.min_loops), ("exit.max_loops", exits.max_loops or 1)):
        if loops > spec.loops:
            problems.append(f"{key} {loops} is more than the model's {spec.loops} loops")
    problems += family_refusals(config, spec.family, spec.loops)
    if problems:
        raise ConfigError(problems)


def family_refusals(config: Config, family: str, loops: int) -> list[str]:
    """Why a model of `family` with this many loops cannot run with this configuration, one line per setting."""
    why = FAMILIES[family].full_depth
    if why is None:
        return []
    exits, layout = config.exit, config.kv.layout
    refused = {
        f"kv.layout {layout}": parse_layout(layout).cycle is not None,
        # "ouro" is what the configuration says when nobody chose a rule; without a gate it is full depth.
        f"exit.rule {exits.rule}": exits.rule != "ouro",
        f"exit.threshold {exits.threshold}": exits.threshold is not None and exits.threshold < 1,
        f"exit.max_loops {exits.max_loops}": exits.max_loops is not None and exits.max_loops < loops,
    }
    return [f"{setting} does not go with a {family} model: {why}" for setting, no in refused.items() if no]


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


def family_reason(family: str, feature: Feature) -> str | None:
    """Why models of `family` do not go with `feature`, or None if they do."""
    from rlt.config import load_config

    if not family_refusals(load_config(overrides=feature.settings), family, loops=2):
        return None
    return f"{FAMILIES[family].title}: {FAMILIES[family].full_depth}"


def matrix() -> str:
    """The matrix of features and layouts as a Markdown table, with the reasons for each "no" below it."""
    return _table({f"`{layout}`": layout for layout in LAYOUTS}, FEATURES, reason)


def family_matrix() -> str:
    """The same of the settings that depend on the model's family."""
    return _table({family.title: name for name, family in FAMILIES.items()}, FAMILY_FEATURES, family_reason)


def _table(columns: Mapping[str, str], features: tuple[Feature, ...], why: Callable[[str, Feature], str | None]) -> str:
    """A Markdown table with a column per title and a row per feature; `why` says for each cell why it is a "no"."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    reasons: dict[str, int] = {}
    for feature in features:
        cells = []
        for key in columns.values():
            no = why(key, feature)
            cells.append("yes" if no is None else f"no [{reasons.setdefault(no, len(reasons) + 1)}]")
        lines.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"[{number}] {no}." for no, number in reasons.items())])


if __name__ == "__main__":
    print(f"{matrix()}\n\n{family_matrix()}")
