"""The support matrix: every "yes" runs, every "no" is refused with its reason, and the README shows this table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlt.config import ConfigError, load_config
from rlt.support import FEATURES, LAYOUTS, matrix, reason
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


def test_readme_shows_the_matrix():
    assert matrix() in README.read_text(), "run python -m rlt.support and paste its output into the README"
