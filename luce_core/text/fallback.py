"""Chat templates for files that bring none, chosen by the markers their vocabulary holds.

Each is a plain rendering of its family's turns. Tools are described in the system turn, as JSON, with the
call format most families were trained on.
"""

from __future__ import annotations

from collections.abc import Collection

_SYSTEM = """\
{%- set ns = namespace(system='', turns=messages) -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.system = messages[0].content -%}
{%- set ns.turns = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{%- set ns.system = (ns.system ~ '\\n\\n' if ns.system else '')
    ~ 'You may call these tools. Each line between the tags describes one as JSON:\\n<tools>' -%}
{%- for tool in tools -%}{%- set ns.system = ns.system ~ '\\n' ~ (tool | tojson) -%}{%- endfor -%}
{%- set ns.system = ns.system ~ '\\n</tools>\\n'
    ~ 'To call one, answer with its name and arguments as JSON between tags:\\n'
    ~ '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>' -%}
{%- endif -%}
{%- macro content(message) -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}<tool_call>{{ '\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n' }}</tool_call>
{%- endfor -%}
{%- endmacro -%}
{%- macro result(message) -%}
{{ '<tool_response>\\n' ~ content(message) ~ '\\n</tool_response>' }}
{%- endmacro -%}
"""

_CHATML = _SYSTEM + """\
{%- if ns.system -%}{{ '<|im_start|>system\\n' ~ ns.system ~ '<|im_end|>\\n' }}{%- endif -%}
{%- for message in ns.turns -%}
{%- if message.role == 'tool' -%}{{ '<|im_start|>user\\n' ~ result(message) ~ '<|im_end|>\\n' }}
{%- else -%}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ content(message) ~ '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_LLAMA3 = _SYSTEM + """\
{%- macro turn(role, text) -%}
{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' ~ text ~ '<|eot_id|>' }}
{%- endmacro -%}
{{ bos_token }}
{%- if ns.system -%}{{ turn('system', ns.system) }}{%- endif -%}
{%- for message in ns.turns -%}
{{ turn('ipython', result(message)) if message.role == 'tool' else turn(message.role, content(message)) }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""


def _two_sided(start: str, end: str) -> str:
    # These families know no system turn: its text leads the first user turn.
    return _SYSTEM + f"""\
{{{{ bos_token }}}}
{{%- if ns.system and not (ns.turns and ns.turns[0].role == 'user') -%}}
{{{{ '{start}user\\n' ~ ns.system ~ '{end}\\n' }}}}{{%- set ns.system = '' -%}}
{{%- endif -%}}
{{%- for message in ns.turns -%}}
{{{{ '{start}' ~ ('model' if message.role == 'assistant' else 'user') ~ '\\n' }}}}
{{%- if ns.system -%}}{{{{ ns.system ~ '\\n\\n' }}}}{{%- set ns.system = '' -%}}{{%- endif -%}}
{{{{ (result(message) if message.role == 'tool' else content(message)) ~ '{end}\\n' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '{start}model\\n' }}}}{{%- endif -%}}
"""


_PLAIN = _SYSTEM + """\
{{ bos_token }}
{%- if ns.system -%}{{ ns.system ~ '\\n\\n' }}{%- endif -%}
{%- for message in ns.turns -%}
{{ (message.role | capitalize) ~ ': ' ~ content(message) ~ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""

FALLBACK_TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "llama3": _LLAMA3,
    "gemma": _two_sided("<start_of_turn>", "<end_of_turn>"),
    "gemma4": _two_sided("<|turn>", "<turn|>"),
    "plain": _PLAIN,
}

_MARKS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma4": ("<|turn>", "<turn|>"),
}


def choose_fallback(tokens: Collection[str]) -> str:
    """The name of the family whose every marker the vocabulary holds; `plain` if there is none."""
    known = frozenset(tokens)
    return next((name for name, marks in _MARKS.items() if known.issuperset(marks)), "plain")
