"""Which features work together: the table that start-up checks and the README's matrix are made of. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rlt.attention.backends import BACKENDS
from rlt.depth.table import RULES
from rlt.errors import ConfigError
from rlt.kernels import available
from rlt.kv.layout import parse_layout
from rlt.models.families import FAMILIES

if TYPE_CHECKING:
    from rlt.config import Config, ExitConfig
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
    *(
        Feature(
            f"exit rule `{rule}`", {"exit": {"rule": rule} | ({"trace_file": "depths.json"} if rule == "trace" else {})}
        )
        for rule in RULES
    ),
)

#: What a family may exclude; every other feature goes with all of them.
FAMILY_FEATURES = (
    *(Feature(f"layout `{layout}`", {"kv": {"layout": layout}}) for layout in LAYOUTS),
    *(feature for feature in FEATURES if "exit" in feature.settings),
    Feature("fewer loops than trained", {"exit": {"max_loops": 1}}),
    Feature("seeded initial states", {"model": {"initial_state": "seeded"}}),
    Feature("warm start", {"model": {"warm_start": True}}),
)


def refusals(config: Config) -> list[str]:
    """Why this configuration cannot run, one line per combination that is not supported."""
    problems = []
    if config.engine.wavefront and config.kv.layout == "shared":
        problems.append(
            "engine.wavefront does not go with kv.layout shared: with one plane for all loops, a prompt token finishes "
            "all its loops before the next one starts"
        )
    return problems + _kernel_problems(config) + _exit_problems(config.exit)


def _kernel_problems(config: Config) -> list[str]:
    """Kernels that are asked for and cannot run, as far as that is known without looking at the device."""
    device = (config.engine.device or "cuda").partition(":")[0]
    if device not in available.DTYPES:
        return []
    why = available.obstacle(device, None if config.model.dtype == "auto" else config.model.dtype)
    if why is None:
        return []
    asked = {"attention": config.engine.attention, "kernels": config.engine.kernels}
    return [f'engine.{key} = "triton" cannot run on {device}: {why}' for key, name in asked.items() if name == "triton"]


def _exit_problems(exits: ExitConfig) -> list[str]:
    """Settings of [exit] that contradict each other."""
    problems, threshold = [], exits.threshold
    if exits.rule is not None and threshold is not None:
        limits = RULES[exits.rule].thresholds
        if limits is None:
            problems.append('exit.threshold has no meaning with exit.rule = "trace", whose depths come from the file')
        elif not limits[0] <= threshold <= limits[1]:
            problems.append(
                f'exit.threshold must be between {limits[0]:.7g} and {limits[1]:.7g} with exit.rule = "{exits.rule}", '
                f"got {threshold:g}"
            )
    if (exits.rule == "trace") != (exits.trace_file is not None):
        problems.append('exit.trace_file and exit.rule = "trace" go together: set both or neither')
    if exits.check_interval > 1 and not (exits.rule is not None and RULES[exits.rule].logits):
        named = ", ".join(name for name, kind in RULES.items() if kind.logits)
        problems.append(f"exit.check_interval has a meaning with the exit rules {named} only")
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


def exit_rule(config: Config, family: str) -> str:
    """The exit rule that a model of `family` runs with: a key of `RULES`."""
    return config.exit.rule or FAMILIES[family].rule


def family_refusals(config: Config, family: str, loops: int) -> list[str]:
    """Why a model of `family` with this many loops cannot run with this configuration, one line per setting."""
    return [
        f"{setting} does not go with a {family} model: {why}"
        for setting, why in _refused_settings(config, family, loops)
    ]


def _refused_settings(config: Config, family: str, loops: int) -> list[tuple[str, str]]:
    """Settings and the reason for each."""
    facts, exits, model, layout = FAMILIES[family], config.exit, config.model, config.kv.layout
    rule = exit_rule(config, family)
    refused = []
    if facts.full_depth is not None:
        settings = {
            f"kv.layout {layout}": parse_layout(layout).cycle is not None,
            f"exit.rule {rule}": rule != "full_depth",
            f"exit.threshold {exits.threshold}": exits.threshold is not None and exits.threshold < 1,
            f"exit.max_loops {exits.max_loops}": exits.max_loops is not None and exits.max_loops < loops,
        }
        refused += [(setting, facts.full_depth) for setting, no in settings.items() if no]
    elif RULES[rule].gate and not RULES[facts.rule].gate:
        refused.append((f"exit.rule {rule}", "it was trained without an exit gate"))
    elif exits.rule is None and exits.threshold is not None and exits.threshold < 1 and rule == "full_depth":
        why = "without an exit rule every token runs all loops; set exit.rule too"
        refused.append((f"exit.threshold {exits.threshold}", why))
    if not facts.start_states:
        settings = {
            f"model.initial_state {model.initial_state}": model.initial_state != "zero",
            f"model.warm_start {model.warm_start}": model.warm_start,
        }
        why = "its tokens start from their embeddings alone"
        refused += [(setting, why) for setting, no in settings.items() if no]
    return refused


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

    refused = _refused_settings(load_config(overrides=feature.settings), family, loops=2)
    return f"{FAMILIES[family].title}: {refused[0][1]}" if refused else None


def matrix() -> str:
    """The matrix of features and layouts as a Markdown table, with the reasons for each "no" below it."""
    return _table({f"`{layout}`": layout for layout in LAYOUTS}, FEATURES, reason)


def family_matrix() -> str:
    """The same of the settings that depend on the model's family."""
    return _table({family.title: name for name, family in FAMILIES.items()}, FAMILY_FEATURES, family_reason)


def attention_matrix() -> str:
    """The attention back ends and what each can do, as a Markdown table."""
    lines = ["| `engine.attention` | devices and dtypes | compared with a reference on |", "|---|---|---|"]
    for name, backend in BACKENDS.items():
        places = "; ".join(f"{device}: {', '.join(dtypes)}" for device, dtypes in backend.dtypes.items())
        lines.append(f"| `{name}` | {places} | {backend.validated} |")
    return "\n".join(lines)


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
    print(f"{matrix()}\n\n{family_matrix()}\n\n{attention_matrix()}")
