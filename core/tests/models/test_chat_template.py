"""Chat templates are written as transformers writes them, and do not compute for ever or build gigabytes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from hardpoint.models.chat_template import MAX_SECONDS, TemplateTakesTooMuch, render

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind.\n"},
    {"role": "user", "content": "  Moon?  "},
    {
        "role": "assistant",
        "content": "A rock.",
        "reasoning": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": {"é": 1}}}],
    },
    {"role": "tool", "content": None, "parts": [{"type": "text", "text": "x"}, ("a", 1.5)]},
    {"role": "user", "content": "Thanks"},
]
TEMPLATES = {
    "plain": "{% for m in messages %}\n    <|{{ m['role'] }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}\n{{ bos_token }}",
    "loop": "{% for m in messages[1:] if m.content %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ m.role.upper() }}{% endfor %}",
    "names": """{%- set ns = namespace(text='', seen=[]) -%}
{%- for m in messages -%}
    {%- if loop.first and m.role == 'system' %}{% continue %}{% endif -%}
    {%- if loop.index > 4 %}{% break %}{% endif -%}
    {%- set ns.text = ns.text ~ m.role ~ ':' ~ loop.index -%}
    {%- set ns.seen = ns.seen + [m.role] -%}
{%- endfor -%}
{{ ns.text }}{{ ns.seen | join(', ') }}{{ ns.seen }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}""",
    "json": "{{ messages[2].tool_calls | tojson }}{{ messages[2] | tojson(indent=2) }}{{ 'é<' | tojson(ensure_ascii=true) }}",
    "macro": """{% macro show(m, deep=1) %}{% if deep %}[{{ show(m, deep - 1) }}]{% else %}{{ m.content | trim }}{% endif %}{% endmacro %}
{{ messages | map(attribute='role') | join('|') }}{% for m in messages %}{{ show(m, 3) if m.content is string else 'none' }}{% endfor %}""",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content ~ m.thinking }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{% endfor %}{{ x }}",
    "methods": """{{ messages[1].content.strip().split('?')[0].replace('o', '0') }}{{ '%s-%05d' % ('a', 7) }}{{ '{:>6}'.format('b') }}
{{ 'ab' * 3 }}{{ [1, 2] * 2 }}{{ 2 ** 10 + 7 % 4 }}{{ {'a': (1, 2)} }}{{ dict(a=1).items() | list }}{{ 'a\tb'.expandtabs(4) }}""",
    "blocks": "{% set x %}a{{ messages | length }}{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}"
    "{% for a, b in {'k': 1}.items() %}{{ a }}{% endfor %}",
    "rest": "{{ add_generation_prompt }}{{ tools is none }}{{ documents }}{{ undefined_name }}"
    "{{ messages[-1]['content'][::-1] }}{% if not tools %}no{% endif %}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<x>"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_written_as_transformers_writes_it(name: str) -> None:
    # Before it renders, transformers drops what is None.
    given = [{key: value for key, value in one.items() if value is not None} for one in MESSAGES]
    (expected,), _ = render_jinja_template(
        [given], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL
    )
    assert render(TEMPLATES[name], MESSAGES, add_generation_prompt=True, **SPECIAL) == expected


@pytest.mark.parametrize(
    "text", ["raise_exception('no')", "''.__class__.__mro__", "namespace(_x=1)", "lipsum()", "messages.append(1)"]
)
def test_what_a_template_may_not_do_is_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        render(f"{{{{ {text} }}}}", MESSAGES)


HUNGRY = [
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10 ** (2 ** 40) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "{{ 'x' | indent(10**10, true) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**7).join(['a'] * 1000) }}",
    "{{ (['a'] * 1000) | join('x' * 10**7) }}",
    "{{ (['x' * 10**7] * 1000) | join }}",
    "{{ ('x\\n' * 10**6) | indent('y' * 10**6) }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x }}",
    "{% set x = 'x' * 10**6 %}{% for i in range(10**5) %}{{ x }}{% endfor %}",
    "{% set x = 'x' * 10**6 %}{% set ns = namespace(l=[]) %}{% for i in range(9**5) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "{% for a in range(99999) %}" + "x" * 10**5 + "{% endfor %}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]


@pytest.mark.parametrize("template", HUNGRY)
def test_a_template_that_would_build_gigabytes_is_refused_before(template: str) -> None:
    start = time.thread_time()
    with pytest.raises(TemplateTakesTooMuch, match="builds more than"):
        render(template, MESSAGES)
    assert time.thread_time() - start < MAX_SECONDS


@pytest.mark.parametrize("template", ENDLESS, ids=["loops", "calls"])
def test_a_template_that_does_not_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint.models.chat_template.MAX_SECONDS", 0.2)
    with pytest.raises(TemplateTakesTooMuch, match=r"computes for more than 0\.2 s"):
        render(template, MESSAGES)
