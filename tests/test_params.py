"""Request parameters: defaults, limits, and errors that name their field."""

from __future__ import annotations

import math

import msgspec
import pytest

from rlt_protocols.params import ModelInfo, ParamError, SamplingParams, resolve

INFO = ModelInfo(
    name="m",
    family="ouro",
    vocab_size=100,
    max_model_len=64,
    loops=4,
    min_loops=2,
    max_loops=4,
    exit_threshold=0.7,
    eos_token_ids=(0, 2),
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    kv_tokens=48,
)

#: beyond what a float can hold
HUGE = 10**400
INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "min_loops", "max_loops", "priority")


def check(prompt_tokens=8, info=INFO, **given):
    return resolve(SamplingParams(**given), info, prompt_tokens, random_seed=11)


def test_defaults_are_the_models():
    got = check()
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (0.6, 0.95, 20, 0.0, 11)
    assert (got.min_loops, got.max_loops, got.exit_threshold) == (2, 4, 0.7)
    assert got.max_tokens == 40, "what the cache has left beside the prompt"
    assert got.end_token_ids == (0, 2)


def test_a_lower_limit_of_loops_lowers_the_default_minimum():
    assert check(max_loops=1).min_loops == 1


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("max_tokens", {"max_tokens": 0}, "must be at least 1, got 0"),
        ("max_tokens", {"max_tokens": 41}, "41 with a prompt of 8 tokens is more than the limit of 48 tokens"),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}, "must be between 0 and 4, got 5"),
        ("temperature", {"temperature": math.nan}, "must be between 0 and 100, got nan"),
        ("temperature", {"temperature": -0.1}, "must be between 0 and 100, got -0.1"),
        ("top_p", {"top_p": 0.0}, "must be greater than 0 and at most 1, got 0.0"),
        ("top_p", {"top_p": math.nan}, "must be greater than 0 and at most 1, got nan"),
        ("top_k", {"top_k": -2}, "must be at least -1, got -2"),
        ("min_p", {"min_p": 1.5}, "must be between 0 and 1, got 1.5"),
        ("seed", {"seed": 1 << 63}, f"must fit in 64 bits, got {1 << 63}"),
        ("stop", {"stop": ("a",) * 17}, "has 17 entries; at most 16 are allowed"),
        ("stop", {"stop": ("",)}, "has an empty string"),
        ("stop_token_ids", {"stop_token_ids": (1,) * 17}, "has 17 entries; at most 16 are allowed"),
        ("stop_token_ids", {"stop_token_ids": (5, 100)}, "token id 100 at index 1 is outside the vocabulary of 100"),
        ("max_loops", {"max_loops": 5}, "must be between 1 and 4, got 5"),
        ("min_loops", {"min_loops": 3, "max_loops": 2}, "must be between 1 and 2, got 3"),
        ("exit_threshold", {"exit_threshold": -1.0}, "must be between 0 and 1000000 with exit rule ouro, got -1.0"),
        ("priority", {"priority": 1}, 'needs a server with engine.scheduling = "priority"'),
        ("prompt", {"prompt_tokens": 0}, "is empty; at least one token is needed"),
        ("prompt", {"prompt_tokens": 48}, "has 48 tokens; the KV cache holds 48 with the output"),
        ("prompt", {"prompt_tokens": 64}, "has 64 tokens; the model's context is 64 tokens with the output"),
    ],
)
def test_errors_name_the_field(field, given, message):
    with pytest.raises(ParamError) as caught:
        check(**given)
    assert (caught.value.field, caught.value.message) == (field, message)


def test_a_threshold_means_what_the_servers_rule_says():
    cosine = msgspec.structs.replace(INFO, exit_rule="cosine", exit_thresholds=(0.0, 2.0), exit_threshold=0.001)
    assert check(info=cosine).exit_threshold == 0.001
    assert check(info=cosine, exit_threshold=2).exit_threshold == 2
    with pytest.raises(ParamError, match=r"must be between 0 and 2 with exit rule cosine, got 2\.5"):
        check(info=cosine, exit_threshold=2.5)
    for value in (math.nan, HUGE, -HUGE):
        with pytest.raises(ParamError, match="exit_threshold: must be between 0 and 2"):
            check(info=cosine, exit_threshold=value)
    trace = msgspec.structs.replace(INFO, exit_rule="trace", exit_thresholds=None)
    assert check(info=trace).exit_threshold == INFO.exit_threshold
    with pytest.raises(ParamError, match="exit_threshold: has no meaning with exit rule trace"):
        check(info=trace, exit_threshold=1.0)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [HUGE, -HUGE])
def test_integers_of_any_size_are_refused_by_name(field, value):
    if (field, value) == ("top_k", HUGE):
        assert check(top_k=HUGE).top_k == INFO.vocab_size, "it keeps all tokens, as every top_k of that size"
        return
    with pytest.raises(ParamError) as caught:
        check(**{field: value})
    assert caught.value.field == field


def test_own_stop_ids_are_told_apart_from_the_models():
    got = check(stop_token_ids=(2, 9, 9))
    assert (got.end_token_ids, got.stop_token_ids) == ((0, 2, 9), (9,))
    got = check(stop_token_ids=(2, 9), ignore_eos=True)
    assert (got.end_token_ids, got.stop_token_ids) == ((2, 9), (2, 9))


def test_negative_seeds_become_63_bits():
    assert check(seed=-1).seed == (1 << 63) - 1
