"""The whole engine against the dense reference: whatever happens around a request, it gets its solo run's answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.small_models import HUGINN, OURO, VOCAB, Shape
from engine.watched import (
    AT_ONCE,
    EARLIER,
    LATER,
    NEVER,
    NOISE,
    SHAPES,
    SOMETIMES,
    Models,
    Watched,
    accepted,
    model_name,
)
from reference.rules import LOGITS_RULES
from rlt.errors import ConfigError
from support import resolved, run_to_end

#: Examples of the state machine; `--hypothesis-profile NAME` of a registered profile overrides it.
EXAMPLES = 24
STEPS = 10

LAYOUTS = ("last_exited", "last_exited_copy", "shared", "last_step", "cyclic:1", "cyclic:2", "cyclic:3", "cyclic:5")
GATE_RULES = ("ouro", "ouro_delayed", "random_lookahead", "trace")
CRITERIA = ("latent_diff", "cosine", "entropy", "kl", "minp_kl", "argmax")
#: what a family's models can be set to
RULES = {
    "ouro": (*GATE_RULES, *CRITERIA, "full_depth"),
    "huginn": (*CRITERIA, "random_lookahead", "trace", "full_depth"),
    "nanbeige": ("full_depth",),
}


def those_accepted(section: str, key: str, values: tuple[Any, ...]) -> Any:
    """A strategy for the values that exist; a key that does not exist is dropped in `tree` whatever is drawn."""
    return st.sampled_from([value for value in values if accepted(section, key, value)] or values)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- any mix of everything -------------------------------------------------------------------------------------------

_random = random.Random(3)
#: prompts are a piece of one of these and a piece of another, so that many share a prefix and some part in a page
TEXTS = [[_random.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
KEEP = (8, 3, 0, 12, 16, 17, 24, 33)


def prompt_of(base: int, keep: int, other: int, extra: int) -> list[int]:
    return TEXTS[base][:keep] + TEXTS[other][:extra] or TEXTS[base][:1]


switches = st.fixed_dictionaries(
    {
        "engine": st.fixed_dictionaries(
            {
                "wavefront": those_accepted("engine", "wavefront", (None, True, False)),
                "mixed": st.booleans(),
                "async_scheduling": st.booleans(),
                "preemption": st.booleans(),
                "scheduling": st.sampled_from(["fcfs", "priority"]),
                "max_bypass": st.sampled_from([0, 1, 64]),
                "prefill_chunk": st.integers(1, 16),
            }
        ),
        "kv": st.fixed_dictionaries(
            {
                "layout": those_accepted("kv", "layout", LAYOUTS),
                "prefix_cache": st.booleans(),
                "page_size": st.sampled_from([2, 4, 1, 3, 7, 8, 16]),
                "watermark": st.sampled_from([0.0, 0.0, 0.01, 0.25]),
            }
        ),
        "exit": st.fixed_dictionaries({"check_interval": st.sampled_from([1, 1, 2])}),
        "model": st.fixed_dictionaries(
            {"initial_state": st.sampled_from(["zero", "seeded"]), "warm_start": st.booleans()}
        ),
    }
)


def fitting(shape: Shape, rule_name: str, sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`sections` without what does not go with the family or the rule; tests of refusals are elsewhere."""
    sections["exit"]["rule"] = rule_name
    if rule_name not in LOGITS_RULES:
        del sections["exit"]["check_interval"]
    if shape.family != "huginn":
        del sections["model"]
    if shape.family == "nanbeige" and sections["kv"]["layout"] not in LAYOUTS[:2]:
        sections["kv"]["layout"] = "last_exited"
    return sections


requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(prompt_of, st.integers(0, 1), st.sampled_from(KEEP), st.integers(0, 2), st.integers(0, 9)),
        "max_tokens": st.sampled_from([12, 8, 16, 24, 1, 2, 3, 5]),
        "min_tokens": st.sampled_from([0, 0, 0, 1, 3]),
        "stop_at": st.sampled_from([None, None, None, None, 0, 2, 5]),
        "max_loops": st.sampled_from([4, 4, 4, 4, 3, 2, 1]),
        "min_loops": st.sampled_from([1, 1, 2, 3]),
        "level": st.sampled_from([SOMETIMES, SOMETIMES, EARLIER, LATER, AT_ONCE, NEVER]),
        "seed": st.sampled_from([0, 0, 0, 1]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.7]),
        "repetition_penalty": st.sampled_from([None, None, None, 1.3]),
        "logit_bias": st.sampled_from([None, None, None, {5: 3.0, 9: -4.0}]),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from([None, None, None, None, "a", "b"]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go, and the engine steps; the checks are those of `Watched`."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.models = models
        self.watched: Watched | None = None

    @initialize(
        kind=st.sampled_from(SHAPES).flatmap(
            lambda shape: st.tuples(st.just(shape), st.sampled_from(RULES[shape.family]))
        ),
        sections=switches,
        max_seqs=st.sampled_from([3, 4, 6, 2, 1]),
        more_rows=st.integers(0, 20),
        kv_tokens=st.sampled_from([30, 36, 42, 50, 60, 20]),
        first=st.lists(requests, min_size=3, max_size=6),
    )
    def start(self, kind, sections, max_seqs, more_rows, kv_tokens, first):
        shape, rule_name = kind
        sections = fitting(shape, rule_name, sections)
        sections["engine"] |= {"max_seqs": max_seqs, "max_tick_tokens": max_seqs + more_rows}
        sections["kv"]["pages"] = (-(-kv_tokens // sections["kv"]["page_size"]) + 2) * shape.lists
        try:
            self.watched = Watched(self.models, shape, sections)
        except ConfigError as error:
            event(f"refused: {error}")
            reject()
        self.loops = shape.loops
        self.failed = False
        self.arrive(first)

    def checked(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # `teardown` runs after a failure too; it must not hide it behind another one.
        self.failed = True
        act(*args, **kwargs)
        self.failed = False

    @rule(batch=st.lists(requests, min_size=1, max_size=2))
    def arrive(self, batch):
        for asked in batch:
            limits = {
                "max_loops": min(asked["max_loops"], self.loops),
                "min_loops": min(asked["min_loops"], asked["max_loops"], self.loops),
                "min_tokens": min(asked["min_tokens"], asked["max_tokens"]),
            }
            self.checked(self.watched.arrive, **asked | limits)

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def cancel(self, data):
        self.checked(self.watched.cancel, data.draw(st.sampled_from(self.live)))

    @rule(count=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, count):
        for _ in range(count):
            self.checked(self.watched.step)

    @property
    def live(self) -> list[str]:
        return [name for name, seen in self.watched.requests.items() if seen.live] if self.watched else []

    def teardown(self):
        if self.watched is not None and not self.failed:
            self.watched.finish()


def examples() -> int:
    """`EXAMPLES`, or what a profile other than the built-in ones says."""
    built_in = settings.get_current_profile_name() in ("default", "ci")
    return EXAMPLES if built_in else settings.default.max_examples


def test_every_request_gets_the_answer_of_its_solo_run(models: Models):
    run_state_machine_as_test(
        lambda: EngineMachine(models),
        settings=settings(
            max_examples=examples(),
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


# -- the same, readable ----------------------------------------------------------------------------------------------

LONG, MIDDLE, SHORT = TEXTS[0][:33], TEXTS[1][:14], TEXTS[2][:1]


def needs(section: str, **values: Any) -> None:
    for key, value in values.items():
        if not accepted(section, key, value):
            pytest.fail(f"{section}.{key} = {value!r} is gone from the configuration: this test would show nothing")


COMBINATIONS = [
    *((shape, rule_name, layout) for shape in OURO[:2] for rule_name in GATE_RULES for layout in LAYOUTS),
    *((HUGINN[0], rule_name, layout) for rule_name in ("latent_diff", "kl") for layout in LAYOUTS),
    *((HUGINN[1], rule_name, "last_exited") for rule_name in (*CRITERIA, "random_lookahead", "trace")),
    *((OURO[0], rule_name, "last_exited") for rule_name in ("latent_diff", "kl")),
]


@pytest.mark.parametrize(("shape", "rule_name", "layout"), COMBINATIONS)
def test_layout_and_rule(models: Models, layout, rule_name, shape):
    needs("kv", layout=layout)
    needs("exit", rule=rule_name)
    watched = Watched(
        models,
        shape,
        {
            "engine": {"max_seqs": 3, "max_tick_tokens": 24, "prefill_chunk": 9},
            "kv": {"layout": layout, "page_size": 4, "pages": 200},
            "exit": {"rule": rule_name},
        },
    )
    for prompt in (LONG, MIDDLE, SHORT):
        watched.arrive(prompt, max_tokens=12, level=SOMETIMES)
        watched.step()
    watched.finish()
    used = {depth for seen in watched.requests.values() for depth in seen.depths}
    assert len(used) > 1, "nothing left early: this shows nothing"


@pytest.mark.parametrize("interval", [2, 3])
@pytest.mark.parametrize("min_loops", [1, 2])
def test_looks_of_criteria_at_an_interval(models: Models, min_loops, interval):
    watched = Watched(models, HUGINN[0], {"kv": {"pages": 300}, "exit": {"rule": "kl", "check_interval": interval}})
    for level in (SOMETIMES, LATER, AT_ONCE):
        watched.arrive(MIDDLE, max_tokens=10, level=level, min_loops=min_loops, ignore_eos=True)
    watched.finish()
    depths = {depth for seen in watched.requests.values() for depth in seen.depths}
    assert depths == {*range(min_loops, 4, interval), 4}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("initial", ["zero", "seeded"])
@pytest.mark.parametrize("shape", HUGINN, ids=model_name)
def test_start_states(models: Models, shape, initial, warm):
    """With the prefix cache, chunks, late results and a pool too small for all: each is what it is alone."""
    watched = Watched(
        models,
        shape,
        {
            "model": {"initial_state": initial, "warm_start": warm},
            "engine": {"max_seqs": 4, "max_tick_tokens": 16, "prefill_chunk": 5, "async_scheduling": True},
            "kv": {"page_size": 2, "pages": 26 * shape.lists, "watermark": 0.0},
            "exit": {"rule": "latent_diff"},
        },
    )
    for prompt in (LONG[:20], LONG[:20], LONG[:17], MIDDLE[:9]):
        for seed in (0, 1):
            watched.arrive(prompt, max_tokens=12, level=SOMETIMES, seed=seed, ignore_eos=True)
    watched.finish()
    assert watched.engine.scheduler.preemptions > 0, "everything fitted: this shows too little"


def test_seeded_prompts_are_shared_by_requests_of_one_seed_alone(models: Models):
    for initial, shared in (("zero", 16), ("seeded", 0)):
        watched = Watched(models, HUGINN[0], {"model": {"initial_state": initial}, "kv": {"pages": 400}})
        for seed, hits in ((0, 0), (0, 16), (1, shared)):
            before = watched.engine.scheduler.hit_tokens
            watched.arrive(LONG, max_tokens=4, seed=seed)
            watched.finish()
            assert watched.engine.scheduler.hit_tokens - before == 2 * hits


def test_start_states_change_answers(models: Models):
    dense = models.dense[HUGINN[0]]
    asked = ({}, {"seed": 0}, {"seed": 1}, {"warm": True}, {"seed": 0, "warm": True})
    answers = [dense.generate(MIDDLE, 4, rule="full_depth", **settings) for settings in asked]
    for one, other in itertools.combinations(answers, 2):
        count = min(len(one.logits), len(other.logits))
        assert (one.logits[:count] - other.logits[:count]).abs().max() > 10 * NOISE["huginn"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("switch", ["wavefront", "mixed", "async_scheduling", "preemption"])
@pytest.mark.parametrize("value", [False, True])
def test_each_switch_alone(models: Models, layout, switch, value):
    needs("kv", layout=layout)
    needs("engine", **{switch: value})
    sections = {
        "engine": {"max_seqs": 3, "max_tick_tokens": 16, "prefill_chunk": 5, switch: value},
        "kv": {"layout": layout, "page_size": 4, "pages": 80, "prefix_cache": False},
    }
    if (layout, switch, value) == ("shared", "wavefront", True):
        with pytest.raises(ConfigError, match="one plane for all loops"):
            Watched(models, SHAPES[0], sections)
        return
    watched = Watched(models, SHAPES[0], sections)
    for prompt in (LONG, MIDDLE, SHORT, LONG[:20], MIDDLE[:9]):
        watched.arrive(prompt, max_tokens=8, level=SOMETIMES)
    watched.finish()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_prefix_cache_changes_no_result(models: Models, layout):
    needs("kv", layout=layout, prefix_cache=True)
    watched = Watched(
        models,
        SHAPES[0],
        {
            "engine": {"max_seqs": 2, "max_tick_tokens": 16, "prefill_chunk": 7},
            "kv": {"layout": layout, "page_size": 4, "pages": 80, "prefix_cache": True},
        },
    )
    same, extended, parted = LONG[:24], LONG[:31], LONG[:14] + MIDDLE[:10]
    for prompt in (same, same, extended, parted, MIDDLE, LONG, same):
        for salt in (None, "salt"):
            watched.arrive(prompt, max_tokens=6, level=SOMETIMES, cache_salt=salt)
        watched.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_too_small_for_all(models: Models, layout, scheduling, asynchronous):
    """Each request alone fits and grows to nearly all pages; whoever is suspended goes on as if nothing had been."""
    needs("kv", layout=layout)
    needs("engine", scheduling=scheduling, async_scheduling=asynchronous, preemption=True)
    watched = Watched(
        models,
        SHAPES[0],
        {
            "engine": {
                "max_seqs": 8,
                "max_tick_tokens": 16,
                "prefill_chunk": 4,
                "preemption": True,
                "scheduling": scheduling,
                "async_scheduling": asynchronous,
            },
            "kv": {"layout": layout, "page_size": 2, "pages": 60, "prefix_cache": False, "watermark": 0.0},
        },
    )
    for index, prompt in enumerate(
        (MIDDLE[:6], MIDDLE[6:], SHORT, LONG[:9], LONG[9:14], LONG[14:20], SHORT, MIDDLE[:8])
    ):
        watched.arrive(prompt, max_tokens=16, level=LATER, priority=-index, ignore_eos=True)
        watched.step()
    watched.finish()
    assert watched.engine.scheduler.preemptions > 0, "everything fitted: this shows nothing"


def test_sampled_requests_are_their_solo_runs(models: Models):
    """The reference is greedy; that draws depend on the seed and the position alone is seen against solo engines."""
    small = {"engine": {"max_seqs": 3, "max_tick_tokens": 7, "prefill_chunk": 4}, "kv": {"page_size": 2, "pages": 120}}
    together, alone = models.engine(SHAPES[0], small), models.engine(SHAPES[0], small)
    asked = [{"seed": seed, "temperature": 1.0, "max_tokens": 12, "exit_threshold": 0.5} for seed in range(6)]
    prompts = [LONG[: 3 * index + 1] for index in range(6)]
    for index, prompt in enumerate(prompts):
        together.add(str(index), prompt, resolved(together, prompt, **asked[index]))
    done = run_to_end(together)
    for index, prompt in enumerate(prompts):
        alone.add("solo", prompt, resolved(alone, prompt, **asked[index]))
        solo = run_to_end(alone)["solo"]
        assert (done[str(index)].tokens, done[str(index)].depths) == (solo.tokens, solo.depths)


def test_limits_are_each_requests_own(models: Models):
    watched = Watched(models, SHAPES[0], {"engine": {"max_seqs": 12}, "kv": {"pages": 400, "page_size": 4}})
    for low, high in ((1, 4), (2, 4), (4, 4), (1, 3), (3, 3), (1, 1)):
        for level in (AT_ONCE, SOMETIMES, NEVER):
            name = watched.arrive(MIDDLE, max_tokens=10, min_loops=low, max_loops=high, level=level, min_tokens=10)
            assert name is not None
    watched.finish()
    for seen in watched.requests.values():
        assert seen.depths[0] == seen.asked.max_loops
        assert all(seen.asked.min_loops <= depth <= seen.asked.max_loops for depth in seen.depths)


def test_the_comparison_can_fail(models: Models):
    """Negative control: the engine's answers are not those of another layout, rule or threshold."""
    watched = Watched(models, SHAPES[0], {"engine": {"max_seqs": 2}, "kv": {"pages": 200, "page_size": 4}})
    name = watched.arrive(LONG, max_tokens=10, level=SOMETIMES)
    watched.finish()
    seen = watched.requests[name]
    assert seen.want.sure() == len(seen.want.tokens)
    dense = models.dense[SHAPES[0]]
    for wrong in (
        {"layout": "shared"},
        {"layout": "last_step"},
        {"layout": "cyclic:2"},
        {"rule": "ouro_delayed"},
        {"threshold": 1.0},
        {"min_loops": 2},
        {"max_loops": 3},
    ):
        other = dense.generate(LONG, 10, **{"threshold": 0.5} | wrong)
        assert (other.tokens, other.depths) != (seen.tokens, seen.depths), wrong
