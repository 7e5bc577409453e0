"""The support matrix: every "yes" runs, every "no" is refused with its reason, and the README shows this table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlt.config import load_config
from rlt.depth.table import RULES
from rlt.errors import ConfigError
from rlt.models.families import FAMILIES
from rlt.support import (
    FAMILY_FEATURES,
    FEATURES,
    LAYOUTS,
    attention_matrix,
    family_matrix,
    family_reason,
    matrix,
    reason,
)
from support import Golden, resolved, run_to_end

README = Path(__file__).parents[2] / "README.md"
PAIRS = [(layout, feature) for layout in LAYOUTS for feature in FEATURES]


@pytest.mark.parametrize(("layout", "feature"), PAIRS, ids=[f"{layout}-{f.name}" for layout, f in PAIRS])
def test_yes_runs_and_no_is_refused(layout, feature, make_engine, tmp_path):
    tree = {section: dict(values) for section, values in feature.settings.items()}
    tree.setdefault("kv", {})["layout"] = layout
    if "exit" in tree and "trace_file" in tree["exit"]:
        (tmp_path / "depths.json").write_text(json.dumps({"depths": [[1, 2, 3], [4]]}))
        tree["exit"]["trace_file"] = str(tmp_path / "depths.json")
    why = reason(layout, feature)
    if why is not None:
        with pytest.raises(ConfigError) as caught:
            load_config(overrides=tree)
        assert str(caught.value) == why
        assert len(why) > 40
        return
    engine = make_engine(**tree)
    rule = tree.get("exit", {}).get("rule", "ouro")
    for index in range(3):
        prompt = [5 + index, 9, 17, 33, 65, 20]
        engine.add(f"r{index}", prompt, resolved(engine, prompt, max_tokens=6, exit_threshold=easily(rule)))
    done = run_to_end(engine)
    assert all(len(done[f"r{index}"].tokens) == 6 for index in range(3))
    early = {depth for result in done.values() for depth in result.depths[1:]} - {4}
    assert bool(early) == (rule != "full_depth"), "who left early?"


def easily(rule: str) -> float | None:
    """A threshold at which tokens leave early, if the rule takes one."""
    if RULES[rule].criterion:
        return {"cosine": 2.0, "argmax": 1.0}.get(rule, 1e5)
    return None if rule in ("trace", "full_depth") else 0.5


GOLDEN = {"huginn": "huginn-tiny", "nanbeige": "nanbeige-tiny"}
FAMILY_PAIRS = [(family, feature) for family in GOLDEN for feature in FAMILY_FEATURES]


@pytest.mark.parametrize(("family", "feature"), FAMILY_PAIRS, ids=[f"{name}-{f.name}" for name, f in FAMILY_PAIRS])
def test_what_a_family_runs_and_what_it_refuses(family, feature, make_engine, tmp_path):
    golden = Golden(GOLDEN[family])
    tree = {section: dict(values) for section, values in feature.settings.items()}
    # The first setting is the one in question; the trace rule brings its file.
    section, (key, value), *_ = next((s, *v.items()) for s, v in feature.settings.items())
    tree["model"] = {"path": str(golden.directory)} | tree.get("model", {})
    if value == "trace":
        (tmp_path / "depths.json").write_text(json.dumps({"depths": [[1, 2, 3], [4]]}))
        tree["exit"]["trace_file"] = str(tmp_path / "depths.json")
    why = family_reason(family, feature)
    if why is not None:
        with pytest.raises(ConfigError) as caught:
            make_engine(**tree)
        reason_alone = why.removeprefix(f"{FAMILIES[family].title}: ")
        assert caught.value.problems == [f"{section}.{key} {value} does not go with a {family} model: {reason_alone}"]
        return
    engine, prompt = make_engine(**tree), golden.prompts["p7"]
    rule = value if key == "rule" else "full_depth"
    threshold = easily(rule)
    engine.add("r", prompt, resolved(engine, prompt, max_tokens=6, exit_threshold=threshold))
    depths = run_to_end(engine)["r"].depths
    full = 1 if key == "max_loops" else engine.info.loops
    assert depths[0] == full
    assert (set(depths) == {full}) == (rule == "full_depth")


def test_ouro_refuses_only_what_it_has_no_use_for():
    refused = [feature.name for feature in FAMILY_FEATURES if family_reason("ouro", feature)]
    assert refused == ["seeded initial states", "warm start"]


def test_a_threshold_without_a_rule(make_engine):
    with pytest.raises(ConfigError, match=r"exit.threshold 0.5 does not go with a huginn model: .* set exit.rule too"):
        make_engine(model={"path": str(Golden("huginn-tiny").directory)}, exit={"threshold": 0.5})


def test_readme_shows_the_matrices():
    for table in (matrix(), family_matrix(), attention_matrix()):
        assert table in README.read_text(), "run python -m rlt.support and paste its output into the README"
