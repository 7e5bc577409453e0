"""The support matrix: every "yes" runs, every "no" is refused with its reason, and the README shows this table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlt.config import ConfigError, load_config
from rlt.models.families import FAMILIES
from rlt.support import FAMILY_FEATURES, FEATURES, LAYOUTS, family_matrix, family_reason, matrix, reason
from support import resolved, run_to_end

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
    for index in range(3):
        prompt = [5 + index, 9, 17, 33, 65, 20]
        engine.add(f"r{index}", prompt, resolved(engine, prompt, max_tokens=6, exit_threshold=0.5))
    done = run_to_end(engine)
    assert all(len(done[f"r{index}"].tokens) == 6 for index in range(3))
    assert {depth for result in done.values() for depth in result.depths[1:]} - {4}, "no token left early"


@pytest.mark.parametrize("feature", FAMILY_FEATURES, ids=[feature.name for feature in FAMILY_FEATURES])
def test_nanbeige_yes_runs_and_no_is_refused(feature, make_engine, nanbeige_golden):
    assert family_reason("ouro", feature) is None
    tree = {"model": {"path": str(nanbeige_golden.directory)}}
    tree |= {section: dict(values) for section, values in feature.settings.items()}
    if family_reason("nanbeige", feature) is not None:
        with pytest.raises(ConfigError) as caught:
            make_engine(**tree)
        # The first setting is the one in question; the trace rule brings its file.
        section, (key, value), *_ = next((s, *v.items()) for s, v in feature.settings.items())
        assert caught.value.problems == [
            f"{section}.{key} {value} does not go with a nanbeige model: {FAMILIES['nanbeige'].full_depth}"
        ]
        return
    engine, prompt = make_engine(**tree), nanbeige_golden.prompts["p7"]
    engine.add("r", prompt, resolved(engine, prompt, max_tokens=6))
    assert run_to_end(engine)["r"].depths == [2] * 6


def test_readme_shows_the_matrices():
    for table in (matrix(), family_matrix()):
        assert table in README.read_text(), "run python -m rlt.support and paste its output into the README"
