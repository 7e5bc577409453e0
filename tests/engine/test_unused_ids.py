"""Rows of the vocabulary that no token has are never sampled."""

from __future__ import annotations

import json
import shutil

import pytest

from rlt.models.checkpoint import read_spec
from support import resolved, run_to_end

KNOWN = 200


@pytest.fixture
def padded(tmp_path, nanbeige_golden):
    """The golden Nanbeige with a tokenizer that knows 200 of its 256 ids, the last two of them added tokens."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(nanbeige_golden.directory / name, tmp_path)
    write_tokenizer(tmp_path, {f"t{i}": i for i in range(KNOWN - 2)}, added={"<a>": KNOWN - 2, "<b>": KNOWN - 1})
    return tmp_path


def write_tokenizer(directory, vocab, added):
    tokens = [{"id": i, "content": text} for text, i in added.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": vocab}}))


def test_greedy_takes_the_best_known_id(padded, make_engine, nanbeige_golden):
    engine = make_engine(model={"path": str(padded)})
    wrong = 0
    for name, prompt in nanbeige_golden.prompts.items():
        want = nanbeige_golden.facts["runs"]["full_depth"][name]["tokens"]
        for count, token in enumerate(want):
            logits = nanbeige_golden.tensors[f"{name}.full_depth.logits"][count]
            context = prompt + want[:count]
            engine.add("r", context, resolved(engine, context, max_tokens=1))
            assert run_to_end(engine)["r"].tokens == [logits[:KNOWN].argmax().item()]
            wrong += token >= KNOWN
    assert wrong > 10, "unused ids would have won"


def test_no_filter_lets_an_unused_id_through(padded, make_engine, nanbeige_golden):
    engine = make_engine(model={"path": str(padded)})
    prompt = nanbeige_golden.prompts["p7"]
    for index, filters in enumerate([{}, {"top_k": 250}, {"top_p": 0.999}, {"min_p": 0.0001}]):
        engine.add(f"r{index}", prompt, resolved(engine, prompt, temperature=50.0, max_tokens=100, **filters))
    done = run_to_end(engine)
    tokens = [token for result in done.values() for token in result.tokens]
    assert len(tokens) == 400
    assert max(tokens) < KNOWN
    assert len(set(tokens)) > 80, "it is nearly uniform"


def test_an_unused_id_may_be_in_a_prompt_or_an_end(padded, make_engine):
    engine = make_engine(model={"path": str(padded)})
    prompt = [5, 250, 9]
    params = resolved(engine, prompt, max_tokens=5, min_tokens=3, stop_token_ids=(255, 201))
    engine.add("r", prompt, params)
    assert len(run_to_end(engine)["r"].tokens) == 5


@pytest.mark.parametrize(
    ("model", "added", "known"),
    [
        ({"vocab": {"a": 0, "b": 120}}, [], 121),
        ({"vocab": {"a": 0, "b": 120}}, [{"id": 130, "content": "<c>"}], 131),
        ({"vocab": {"a": 0, "b": 120}}, [{"id": 3, "content": "<c>"}], 121),
        ({"vocab": [["a", -1.0], ["b", -2.0], ["c", -2.5]]}, [], 3),
        ({"vocab": {"a": 0, "b": 1000}}, [], 256),
        ({"vocab": {}}, [], 256),
        ({"vocab": {"a": "x"}}, [], 256),
        ({}, [], 256),
        (None, [{"id": 3, "content": "<c>"}], 256),
    ],
)
def test_where_the_known_ids_end(padded, model, added, known):
    (padded / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": model}))
    assert read_spec(padded).known_tokens == known


def test_without_a_tokenizer_all_ids_are_known(nanbeige_golden):
    assert read_spec(nanbeige_golden.directory).known_tokens == 256
