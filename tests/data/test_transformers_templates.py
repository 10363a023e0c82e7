"""Chat data against transformers: ids and what is learned, for ten tokenizers and templates in public forms.

The templates are short ones of our own with the constructs of public ones. In them ⟦ and ⟧ stand around what the
assistant writes: they are taken out, or, to know where a turn is, replaced by {% generation %} and {% endgeneration %}.
"""

import os
from typing import Any

import pytest

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers"),
]
RECORDS = 500
Messages = list[dict[str, Any]]

LLAMA3 = """{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}
{{- head('system') + 'Today: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{{- system + '<|eot_id|>' }}{%- for message in messages %}{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}{{- head('assistant') }}⟦{{- '{"name": "' + call.name }}
{{- '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}⟧
{%- elif message.role in ['tool', 'ipython'] %}
{{- head('ipython') }}{%- if message.content is string %}{{- message.content }}{%- else %}
{{- message.content | tojson }}{%- endif %}{{- '<|eot_id|>' }}
{%- elif message.role == 'assistant' %}{{- head('assistant') }}⟦{{- message['content'] | trim + '<|eot_id|>' }}⟧
{%- else %}{{- head(message['role']) + message['content'] | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}"""
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '<tools>' }}{%- for t in tools %}{{- '\\n' }}{{- t | tojson }}
{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(open=true, last=messages | length - 1) %}{%- for m in messages[::-1] %}
{%- if ns.open and m.role == 'user' %}{%- set ns.open = false %}{%- set ns.last = messages | length - loop.index %}
{%- endif %}{%- endfor %}{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- elif m.role == 'assistant' %}
{%- set thought = '' %}{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|im_start|>assistant\\n' }}⟦
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}{%- if m.tool_calls %}{%- for call in m.tool_calls %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>' }}⟧{{- '\\n' }}
{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}
{%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- else -%}
{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}{%- for message in rest -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}
{%- endif -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}{%- if role == 'model' -%}⟦
{{- message['content'] | trim if message['content'] is string else message['content'][0]['text'] | trim -}}
{{- '<end_of_turn>' }}⟧{{ '\\n' }}{%- else -%}{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}
{{ part['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(i=0) %}
{%- for m in loop_messages %}{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.i = ns.i + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for m in loop_messages %}
{%- if m.role == 'user' %}{%- if tools is not none and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson }}
{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if loop.last and system is defined %}
{{- '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- endif %}{%- elif m.tool_calls is defined and m.tool_calls is not none %}⟦{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('an id has 9 characters') }}{%- endif %}{{- (call.function | tojson)[:-1] }}
{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}⟧
{%- elif m.role == 'assistant' %}⟦{{- ' ' + m['content'] | trim + eos_token }}⟧
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string | tojson + '}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"""
PHI3 = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}⟦{{
message['content'] + '<|end|>' }}⟧{{ '\\n' }}{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] +
'<|end|>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
R1 = """{%- set ns = namespace(system='', first=true) %}{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + m['content'] %}{%- set ns.first = false %}{%- endif %}
{%- endfor %}{{- bos_token }}{{- ns.system }}{%- for m in messages %}{%- if m['role'] == 'user' %}
{{- '<|User|>' + m['content'] }}{%- elif m['role'] == 'assistant' %}{%- set content = m['content'] %}
{%- if '</think>' in content and not loop.last %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' }}⟦{{- content + eos_token }}⟧{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""
GPT2 = "{% for message in messages %}{% if message.role == 'assistant' %}⟦{{ message.content }}{{ eos_token }}⟧"
GPT2 += "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
TURNS = """{%- macro head(role) -%}{{ '<|im_start|>' + role + '\\n' }}{%- endmacro -%}{%- for m in messages -%}
{{- head(m.role) -}}{%- if m.role == 'assistant' -%}⟦{{- m['content'] + '<|im_end|>' -}}⟧{{- '\\n' -}}
{%- else -%}{{- m['content'] + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- head('assistant') -}}{%- endif -%}"""
CONTEXT = """{%- if tools or documents %}{{- '<|im_start|>system\\n' }}
{%- for t in tools or [] %}{{- t.function | tojson(separators=(',', ':'), sort_keys=true) + '\\n' }}{%- endfor %}
{%- for d in documents or [] %}{{- '[' ~ loop.index ~ '] ' ~ d['title'] | default('untitled', true) | upper }}
{{- ': ' + d['text'] | trim + ('' if loop.last else '\\n') }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}⟦{%- endif %}
{%- if 'content' in m and m.content is not none %}{{- m.content + '\\n' }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson(false, 1) + '</tool_call>\\n' }}
{%- endfor %}{{- '<|im_end|>' }}{%- if m.role == 'assistant' %}⟧{%- endif %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CONTEXT = CONTEXT.replace("{%- if m.role == 'assistant' %}⟦{%- endif %}", "")  # placed below
