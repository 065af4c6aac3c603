"""Hostile templates: each is stopped soon, with little memory, and reaches nothing."""
# ruff: noqa: E501  # a template is easier to read on one line

import time
import tracemalloc

import pytest

from luce_core.errors import ModelFormatError, RequestError
from luce_core.text import ChatTemplate, budget, sandbox

USER = [{"role": "user", "content": "hello " * 100}]
BIG = "{% set ns = namespace(x='0123456789abcdef') %}"


@pytest.fixture
def small(monkeypatch):
    """Small limits, so that reaching them takes no time."""
    monkeypatch.setattr(budget, "MAX_STEPS", 5_000)
    monkeypatch.setattr(budget, "MAX_VALUE_BYTES", 2**18)
    monkeypatch.setattr(budget, "MAX_TOTAL_BYTES", 2**23)
    monkeypatch.setattr(budget, "TOTAL_BYTES_PER_BYTE", 1)


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop over letters": "{% for a in messages[0].content * 9 %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 9,
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% set t = [range(99)] %}{% for a in t recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
    "selected": "{% for i in range(999) %}{% for j in range(9999) | select('odd') %}{% endfor %}{% endfor %}",
    "doubling": BIG + "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling with tilde": BIG + "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling plain text": "{% set ns = namespace(x=messages|string) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "multiplied": "{{ 'x' * 999999999999 }}",
    "multiplied from the left": "{{ 999999999999 * 'x' }}",
    "multiplied list": "{{ [1] * 999999999 }}",
    "power": "{{ 9 ** 99999 }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "kept lists": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [('x' * 9999) ~ i] %}{% endfor %}",
    "many names": BIG + "{% for i in range(9999) %}{% set ns.x = 'x' * 99999 ~ i %}{% endfor %}",
    "nested lists": "{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "nested dicts": "{% set ns = namespace(l={}) %}{% for i in range(99) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}",
    "nested calls to dict": "{% set ns = namespace(l=1) %}{% for i in range(99) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}",
    "doubled lists": "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "varargs": "{% macro m(n) %}{% if n < 99 %}{{ m(n + 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ m(0, 1) }}",
    "comparison of trees": "{% set a = namespace(l=[]) %}{% set b = namespace(l=[]) %}{% for i in range(60) %}"
    "{% set a.l = [a.l, a.l] %}{% set b.l = [b.l, b.l] %}{% endfor %}{{ a.l == b.l }}",
    "list of one big text": "{{ ([messages[0].content * 400] * 999) | string }}",
    "replace between": "{{ messages[0].content | replace('', messages[0].content) | replace('', messages[0].content) }}",
    "replace filter": "{{ (messages[0].content * 90) | replace('l', 'x' * 99999) }}",
    "replace method": "{{ (messages[0].content * 90).replace('l', 'x' * 99999) }}",
    "join filter": "{{ range(99999) | join('x' * 9999) }}",
    "join method": "{{ ('x' * 9999).join(range(9999) | map('string')) }}",
    "indent": "{{ ('\\n' * 9999) | indent(999999999) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=999999999) }}",
    "tojson separators": "{{ range(9999) | list | tojson(separators=('x' * 9999, 'y')) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "nested format width": "{{ '{:{}}'.format(1, 999999999) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format filter width": "{{ '%999999999d' | format(1) }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "date": "{{ strftime_now('%Y' * 999) }}",
    "output": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "output in a macro": "{% macro m() %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endmacro %}{{ m() }}",
    "set block": "{% set y %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
    "printed namespaces": "{% set ns = namespace(x='x' * 9999) %}{{ [ns] * 9999 }}{% for i in range(9999) %}{% endfor %}",
    "printed views": "{% set d = {'k': 'x' * 99999} %}{{ ([d.items()] * 999) | string }}",
    "cycler": "{% set ns = namespace(l=1) %}{% for i in range(99) %}{% set ns.l = cycler(ns.l, ns.l).items %}{% endfor %}",
    "flattened": "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] | sum(start=[]) %}{% endfor %}",
    "words": "{{ ('a ' * 99999).split() }}",
    "parts": "{{ ('a,' * 99999).rsplit(',') }}",
    "lines": "{{ ('\n' * 99999).splitlines() }}",
    "line ends": "{{ ('\n' * 99999) | indent }}",
    "sorted letters": "{{ ('ab' * 99999) | sort }}",
    "joined letters": "{{ ''.join('ab' * 99999) }}",
    "escapes": "{{ ('&' * 99999) | e }}",
    "json of json": "{% set ns = namespace(x='\"') %}{% for i in range(99) %}{% set ns.x = ns.x | tojson %}{% endfor %}",
    "json lists": "{{ ('[' ~ '[],' * 30000 ~ '1]') | from_json }}",
    "format fields": "{{ ('{}' * 99999).format(*range(9)) }}",
    "percent fields": "{{ ('%s' * 99999) % 1 }}",
    "trusted replacement": "{{ ('x' * 99999) | replace('x', 'y') }}",
    "marks": "{{ (('<a>' ~ messages[0].content[:1]) * 50000) | trim }}",
    "letters": "{{ ('x' * 99999) | list | length }}",
    "range": "{% for i in range(999999999) %}{% endfor %}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_stopped(small, bomb):
    template = ChatTemplate(BOMBS[bomb])
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="chat template") as caught:
            template.render(USER)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400
    assert peak < 64 * 2**20  # the limits of this test, a few times over


def test_bombs_that_go_off_while_compiling_are_not_worked_out_then():
    for source in ("{{ 'x' * 999999999999 }}", "{{ 9 ** 9 ** 9 }}", "{% set x = 'x' | indent(999999999, first=true) %}", "{{ '%999999999d' | format(1) }}"):
        ChatTemplate(source)


def test_time_is_a_limit_of_its_own(monkeypatch):
    monkeypatch.setattr(budget, "MAX_CPU_S", 0.05)
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(99) %}{% endfor %}{% endfor %}")
    with pytest.raises(RequestError, match=r"more than 0\.05 s") as caught:
        template.render(USER)
    assert caught.value.code == "chat_template_limit"


TREES = "{% set a = namespace(l=[]) %}{% set b = namespace(l=[]) %}{% for i in range(14) %}{% set a.l = [a.l, a.l] %}{% set b.l = [b.l, b.l] %}{% endfor %}"
STRAIGHT = {
    "comparisons": TREES + "{% if a.l == b.l %}{% endif %}" * 1500,
    "tests": TREES + "{% if a.l is eq(b.l) %}{% endif %}" * 1500,
    "membership": "{% set a = 'x' * 29999999 %}" + "{% if 'y' in a %}{% endif %}" * 1500,
    "filters": "{% set a = 'x' * 999999 %}" + "{% set b = a | upper | title %}" * 200,
    "slices": "{% set a = 'x' * 9999999 %}" + "{% set b = a[1:] %}" * 300,
    "calls": "{% set a = 'x' * 999999 %}" + "{% set b = a.upper().title() %}" * 200,
}


@pytest.mark.parametrize("kind", STRAIGHT)
def test_time_is_looked_at_without_any_loop(monkeypatch, kind):
    template = ChatTemplate(STRAIGHT[kind])
    monkeypatch.setattr(budget, "MAX_CPU_S", 0.1)
    with pytest.raises(RequestError, match=r"more than 0\.1 s"):
        template.render(USER)


def test_a_stopped_template_serves_the_next_request(small):
    template = ChatTemplate("{% for a in range(99999) %}{% for b in messages %}x{% endfor %}{% endfor %}")
    for _ in range(2):
        with pytest.raises(RequestError, match="steps"):
            template.render(USER)
    assert "".join(s.text for s in ChatTemplate("ok").render(USER)) == "ok"


def test_more_input_than_any_prompt_is_refused():
    with pytest.raises(RequestError, match="chat template was stopped"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "x" * (65 * 2**20)}])


def test_a_long_conversation_is_far_from_the_limits():
    messages = [{"role": role, "content": "word " * 80} for _ in range(500) for role in ("user", "assistant")]
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '\\n' }}{% if loop.last %}{{ messages | length }}{% endif %}{% endfor %}"
    template = ChatTemplate(source)
    assert len(template.render(messages)) > 1000
    spent = template._plain._environment.budget
    assert spent.steps < budget.MAX_STEPS / 100
    assert spent.spent_bytes < budget.MAX_TOTAL_BYTES / 100
    assert time.thread_time() < spent.deadline_s


ESCAPES = [
    "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}", "{{ ''.__class__.__mro__ }}",
    "{{ messages.__len__() }}", "{{ ['x'] | map(attribute='__class__') | list }}", "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__self__ }}", "{{ strftime_now.__func__ }}", "{{ self.__dict__ }}",
    "{{ '{0.__class__}'.format('') }}", "{{ ('{0.__class__}' | attr('format'))('') }}", "{{ '{x}'.format_map({'x': 1}) }}",
    "{{ ['{0.__class__}'] | map('attr', 'format') | first }}", "{{ joiner.__init__.__globals__ }}", "{{ lipsum() }}",
    "{{ (1).to_bytes(9, 'big') }}", "{{ (1).real }}", "{{ 'x'.encode() }}", "{{ 'x'.zfill(9) }}", "{{ 'x'.center(9) }}",
    "{{ 'x'.translate({}) }}", "{{ '<a>'._spans }}", "{{ '<a>' | attr('_spans') }}", "{{ '<a>'._with('x', ()) }}",
    "{{ environment }}", "{{ environment.literals }}", "{% set messages.x = 1 %}",
]  # fmt: skip


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_behind_the_sandbox_is_reached(source):
    try:
        segments = ChatTemplate(source).render(USER)
    except (RequestError, ModelFormatError):
        return
    shown = "".join(segment.text for segment in segments)
    assert "class" not in shown
    assert "<a>" not in shown
    assert shown in ("", "[Undefined]", "<function>", "<method>", "<_Undefined>") or shown.startswith("<")


def test_no_filter_exists_beyond_the_listed():
    import jinja2.filters

    allowed = set(sandbox.TemplateSandbox().filters)
    assert not {"pprint", "center", "wordwrap", "urlize", "xmlattr", "batch", "slice", "random", "urlencode"} & allowed
    assert allowed - set(jinja2.filters.FILTERS) == {"luce_count", "from_json"}
