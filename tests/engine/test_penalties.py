"""Penalties and biases: the engine against a plain formula, alone, beside others, and suspended in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference.dense import NOISE
from reference.families import DenseOuro
from reference.penalties import Penalties
from rlt.exec.penalties import NO_ROW
from rlt.exec.penalties import Penalties as Rows
from rlt.exec.slots import Slots
from support import Golden, resolved, run_to_end

CASES: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 1.0},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"logit_bias": {7: 4.0, 11: -100.0, 3: 1.0}},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {2: 2.0}},
]
PROMPT = [5, 9, 31, 7, 5, 12]


def of(params: Any) -> Penalties:
    return Penalties(params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.logit_bias)


@pytest.mark.parametrize("pages", [800, 30])
def test_answers_are_those_of_the_formula(make_engine: Callable[..., Any], ouro_golden: Golden, pages: int) -> None:
    """With few pages requests are suspended, and their counts must come back with them."""
    engine = make_engine(kv={"pages": pages, "page_size": 4, "prefix_cache": False})
    dense = DenseOuro(ouro_golden.directory)
    asked = {str(i): resolved(engine, PROMPT, max_tokens=14, **case) for i, case in enumerate([{}, *CASES])}
    for name, params in asked.items():
        engine.add(name, PROMPT, params)
    got = run_to_end(engine)
    plain = dense.generate(PROMPT, 14, threshold=asked["0"].exit_threshold).tokens
    changed = 0
    for name, params in asked.items():
        want = dense.generate(PROMPT, 14, threshold=params.exit_threshold, penalties=of(params))
        sure = want.sure(NOISE)
        assert sure > 5, "the formula is put to the test"
        assert got[name].tokens[:sure] == want.tokens[:sure], name
        changed += want.tokens != plain
    assert changed >= 5, "penalties are put to the test"
    assert (engine.scheduler.preemptions > 0) == (pages == 30)


def test_rows_are_there_for_those_who_use_them() -> None:
    slots = Slots(4, torch.device("cpu"), end_ids=1)
    rows = Rows(slots, vocab=10)

    class Asks:
        def __init__(self, slot: int, **fields: Any) -> None:
            self.slot, self.prompt = slot, [1, 2]
            off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
            self.params = type("P", (), off | fields)()

    logits = torch.zeros(2, 10)
    both = torch.tensor([0, 3])
    rows.admit(Asks(0))  # type: ignore[arg-type]
    rows.admit(Asks(3))  # type: ignore[arg-type]
    rows.apply(both, logits)
    assert not logits.any()
    rows.admit(Asks(3, presence_penalty=1.0))  # type: ignore[arg-type]
    rows.count(both, torch.tensor([4, 5]))
    rows.apply(both, logits)
    assert logits.nonzero().tolist() == [[1, 5]]
    assert logits[1, 5] == -1.0
    # A suspended request's counts move to another slot; the old one starts anew.
    kept = rows.copy_out(3)
    rows.admit(Asks(3, presence_penalty=0.5))  # type: ignore[arg-type]
    rows.restore(1, kept)
    logits = torch.zeros(2, 10)
    rows.apply(torch.tensor([1, 3]), logits)
    assert logits.nonzero().tolist() == [[0, 5]]
    rows.admit(Asks(1))  # type: ignore[arg-type]
    assert rows.copy_out(1) is None
    assert int(rows._row[1]) == NO_ROW
