"""Chats in the manner of Nanbeige4.2: everything special about them comes from the checkpoint's template and tokenizer.

The template is our own, of the published one's behaviour: a default system text, thinking on unless switched off,
earlier reasoning kept unless switched off. The tokenizer, like the published one, puts a begin token before every text
that it is asked to add special tokens to, while the template writes one itself.
"""

from __future__ import annotations

import json

import msgspec
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from rlt.text.chat import ChatTemplate
from rlt.text.tokenizer import Tokenizer
from rlt_protocols.params import ModelInfo
from rltd.frontend.prepare import Preparer
from text import small_tokenizers

TEMPLATE = """\
{%- set thinking = enable_thinking if enable_thinking is defined else true %}
{%- set preserve = preserve_thinking if preserve_thinking is defined else true %}
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\n你是一个乐于助人的助手。<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content | default('') if preserve or loop.index0 > last.user else '' %}
        {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if not thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

SYSTEM = "<|im_start|>system\n你是一个乐于助人的助手。<|im_end|>\n"
ASKED = "<|im_start|>user\nHi<|im_end|>\n"
HI = [{"role": "user", "content": "Hi"}]
TURNS = [
    *HI,
    {"role": "assistant", "content": "Hello", "reasoning_content": "greet"},
    {"role": "user", "content": "Bye"},
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
INFO = ModelInfo(
    name="nano",
    family="nanbeige",
    vocab_size=1000,
    max_model_len=1000,
    loops=2,
    min_loops=2,
    max_loops=2,
    exit_threshold=1.0,
    eos_token_ids=(),
    kv_tokens=1000,
)


@pytest.fixture
def inner() -> tokenizers.Tokenizer:
    built = small_tokenizers.sentencepiece()
    built.add_special_tokens(SPECIAL)
    start = built.token_to_id("<|im_start|>")
    built.post_processor = TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", start)]
    )
    return built


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_open_unless_switched_off(options: dict[str, bool], end: str) -> None:
    text = ChatTemplate(TEMPLATE).render(HI, kwargs=options)
    assert text == f"{SYSTEM}{ASKED}<|im_start|>assistant\n{end}"


def test_a_system_message_replaces_the_default() -> None:
    text = ChatTemplate(TEMPLATE).render([{"role": "system", "content": "Be brief."}, *HI])
    assert text == f"<|im_start|>system\nBe brief.<|im_end|>\n{ASKED}<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("options", "reasoning"),
    [({}, "greet"), ({"preserve_thinking": True}, "greet"), ({"preserve_thinking": False}, "")],
)
def test_earlier_reasoning_is_kept_unless_switched_off(options: dict[str, bool], reasoning: str) -> None:
    text = ChatTemplate(TEMPLATE).render(TURNS, kwargs=options)
    said = f"<|im_start|>assistant\n<think>\n{reasoning}\n</think>\n\nHello<|im_end|>\n"
    bye = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert text == SYSTEM + ASKED + said + bye


def test_a_chat_of_one_turn_has_three_starts_and_not_four(inner: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(inner)
    preparer = Preparer(tokenizer, ChatTemplate(TEMPLATE), max_answers=1)
    body = json.dumps({"messages": HI}).encode()
    start = tokenizer.token_id("<|im_start|>")
    ids = preparer.tokenize(body, INFO).tokens
    assert ids.count(start) == 3
    assert ids[0] == start != ids[1]
    # The trap: with special tokens, the tokenizer adds one more.
    assert tokenizer.encode(ChatTemplate(TEMPLATE).render(HI)).count(start) == 4
    (choice,) = preparer.chat(body, INFO).choices
    assert list(choice.prompt) == ids


def test_template_options_come_from_the_request(inner: tokenizers.Tokenizer) -> None:
    preparer = Preparer(Tokenizer(inner), ChatTemplate(TEMPLATE), max_answers=1)
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    closed = preparer.tokenize(msgspec.json.encode(body), INFO).tokens
    assert closed.count(inner.token_to_id("</think>")) == 1
