from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlt.errors import ModelError
from rlt.text.chat import ChatTemplate, ChatTemplateError, load_chat_template

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
HI = [{"role": "user", "content": "Hi"}]


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(HI, kwargs={"enable_thinking": True}).endswith("assistant\n<think>\n")


def test_helpers_of_the_hub() -> None:
    source = (
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}kept{% endgeneration %}"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([]) == '<s>{"a": "<é>"}401kept'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ messages.append(1) }}", "unsafe|immutable|cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ missing.attribute }}", "cannot render"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import '/etc/passwd' as x %}", "no loader"),
        ("{% extends '/etc/passwd' %}", "no loader"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages[0].update({'a': 1}) }}", "is unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
        ("{{ 'x' * 10 ** 15 }}", "cannot render"),
    ],
)
def test_what_goes_wrong_in_a_template_is_named(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render(HI)


def test_a_broken_template_is_named() -> None:
    with pytest.raises(ChatTemplateError, match="is broken"):
        ChatTemplate("{% for %}")


def test_options_cannot_replace_the_messages() -> None:
    with pytest.raises(ChatTemplateError, match="messages cannot be set"):
        ChatTemplate(CHATML).render(HI, kwargs={"messages": []})


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("{{ messages }}{{ add_generation_prompt }}{{ tools }}{{ documents }}{{ bos_token }}{{ range(3) }}", set()),
        ("{{ raise_exception('x') if a else strftime_now('y') }}", {"a"}),
        ("{% if a is defined and b %}{% endif %}", {"a", "b"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a | default(true) %}{% set c = namespace(d=1) %}{{ c.d }}", {"a"}),
        ("{% for m in messages %}{% if m.x and a %}{{ loop.index }}{% endif %}{% endfor %}", {"a"}),
        ("{% macro f(x) %}{{ x }}{{ a }}{% endmacro %}{{ f(1) }}", {"a"}),
    ],
)
def test_a_template_tells_its_options(source: str, options: set[str]) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).options == options


def write_config(directory: Path, **entries: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(entries))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    write_config(tmp_path, bos_token={"content": "<b>"}, chat_template="{{ bos_token }}config")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<other>", "eos_token": "<e>"}))
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([]) == "<b>config"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}file")
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([]) == "<e>file"
    override = tmp_path / "mine.jinja"
    override.write_text("mine")
    loaded = load_chat_template(tmp_path, override)
    assert loaded is not None
    assert loaded.render([]) == "mine"


@pytest.mark.parametrize("names", [["default", "tool_use"], ["only"]])
def test_named_templates(tmp_path: Path, names: list[str]) -> None:
    write_config(tmp_path, chat_template=[{"name": name, "template": name} for name in names])
    loaded = load_chat_template(tmp_path)
    assert loaded is not None
    assert loaded.render([]) == names[0]


@pytest.mark.parametrize(
    "value", [[{"name": "a"}], [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], 5]
)
def test_an_unusable_entry_names_the_file(tmp_path: Path, value: object) -> None:
    write_config(tmp_path, chat_template=value)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff"])
def test_a_broken_config_names_the_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)


def test_a_missing_or_broken_override_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.jinja: cannot be read"):
        load_chat_template(tmp_path, tmp_path / "none.jinja")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match=r"bad\.jinja: the chat template is broken"):
        load_chat_template(tmp_path, tmp_path / "bad.jinja")
