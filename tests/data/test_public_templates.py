"""Chat data against transformers: ids and what is learned, for ten tokenizers and templates in public forms.

The templates are short ones of our own with the constructs of public ones. In them ⟦ and ⟧ stand around what the
assistant writes: they are taken out, or, to know where a turn is, replaced by {% generation %} and {% endgeneration %}.
"""

import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dtrain.core.errors import DataError
from dtrain.data.chat import Chat

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers"),
]
RECORDS = 500
MOST = 200
"""Most differences of a form that are counted."""
BEGIN, END = "{% generation %}", "{% endgeneration %}"
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
CONTEXT = """{%- macro body(m) %}{%- if 'content' in m and m.content is not none %}{{- m.content + '\\n' }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson(false, 1) + '</tool_call>\\n' }}
{%- endfor %}{{- '<|im_end|>' }}{%- endmacro %}{%- if tools or documents %}{{- '<|im_start|>system\\n' }}
{%- for t in tools or [] %}{{- t.function | tojson(separators=(',', ':'), sort_keys=true) + '\\n' }}{%- endfor %}
{%- for d in documents or [] %}{{- '[' ~ loop.index ~ '] ' ~ d['title'] | default('untitled', true) | upper }}
{{- ': ' + d['text'] | trim + ('' if loop.last else '\\n') }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}⟦{{- body(m) }}⟧
{%- else %}{{- body(m) }}{%- endif %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


class Form(NamedTuple):
    """A tokenizer with its template: `kind` says how it splits text, `can` what its conversations may have."""

    template: str
    kind: str
    special: str
    config: dict[str, Any]
    can: str = ""


FAST, MARKS = "PreTrainedTokenizerFast", "<|im_start|> <|im_end|> <|endoftext|>"
FORMS = {
    "llama3": Form(LLAMA3, "regex", "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
                   {"tokenizer_class": FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
                   "tools ipython"),
    "qwen3": Form(QWEN3, "nfc", f"{MARKS} <think> </think> <tool_call> </tool_call>",
                  {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"},
                  "tools reasoning"),
    "gemma3": Form(GEMMA3, "gemma", "<pad> <eos> <bos> <start_of_turn> <end_of_turn>",
                   {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}, "parts"),
    "mistral": Form(MISTRAL, "pieces", "<s> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
                    {"tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "</s>"}, "tools"),
    "phi3": Form(PHI3, "stripping", "<|endoftext|> <|user|> <|assistant|> <|system|> <|end|>",
                 {"tokenizer_class": FAST, "eos_token": "<|endoftext|>"}),
    "r1": Form(R1, "bytes", "<|begin|> <|User|> <|Assistant|> <|stop|> <think> </think>",
               {"tokenizer_class": FAST, "bos_token": {"content": "<|begin|>", "__type": "AddedToken"},
                "eos_token": {"content": "<|stop|>", "__type": "AddedToken"}}),
    "gpt2": Form(GPT2, "bytes", "<|endoftext|>", {"tokenizer_class": "GPT2Tokenizer"}),
    "gpt2_map": Form(GPT2, "bytes", "<|endoftext|> <|stop|>", {"tokenizer_class": FAST}),
    "sentencepiece": Form(TURNS, "model", "<|im_start|> <|im_end|>",
                          {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "<|im_end|>"}),
    "sentencepiece_legacy": Form(TURNS, "model", "<|im_start|> <|im_end|>",
                                 {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "<|im_end|>",
                                  "legacy": True}),
    "generation": Form(TURNS, "regex", MARKS, {"tokenizer_class": FAST, "eos_token": "<|im_end|>"}, "generation"),
    "context": Form(CONTEXT, "nfc", f"{MARKS} <tool_call> </tool_call>",
                    {"tokenizer_class": FAST, "eos_token": "<|im_end|>"}, "tools documents"),
}  # fmt: skip
WORDS = (
    "Bern", "the answer is 42", "ä ö ü", "e\u0301le\u0300ve", "日本語", "🙂", "👩\u200d👩\u200d👧", "a\tb",
    "line\nbreak",
    "I'm", "two  spaces", '"q" \\ <b>&amp;', "{{ x }} {% y %}", "end.\r\n", "\u00a0", "1234567", "\n\n", "<|im_end",
)  # fmt: skip
SPLIT = r"(?i:'s|'m)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def folder(place: Path, form: Form) -> None:
    """Write a tiny tokenizer of that kind with its template."""
    place.mkdir()
    special = [AddedToken(text, rstrip=form.kind == "stripping", normalized=False) for text in form.special.split()]
    config = dict(form.config)
    texts = [" ".join(random.Random(number).choices(WORDS, k=8)) for number in range(80)]
    if form.kind == "model":
        import sentencepiece

        with (place / "tokenizer.model").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, model_type="bpe", vocab_size=400, byte_fallback=True,
                normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
                minloglevel=2,
            )  # fmt: skip
        size = sentencepiece.SentencePieceProcessor(model_file=str(place / "tokenizer.model")).get_piece_size()
        added = enumerate(["<unk>", "<s>", "</s>"]), enumerate(form.special.split(), size)
        config["added_tokens_decoder"] = {
            str(number): {"content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for pairs in added for number, text in pairs
        }  # fmt: skip
    else:
        made = _trained(form.kind, texts)
        made.add_special_tokens(special)
        made.save(str(place / "tokenizer.json"))
    if place.name == "gpt2_map":
        (place / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|stop|>"}))
    template = form.template
    if "generation" in form.can:
        template = template.replace("⟦", BEGIN).replace("⟧", END)
    template = template.replace("⟦", "").replace("⟧", "")
    (place / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def _trained(kind: str, texts: list[str]) -> Tokenizer:
    """A byte-level BPE, or one of pieces that falls back to bytes."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bytes")
    if kind in ("bytes", "regex", "nfc"):
        made = Tokenizer(models.BPE())
        made.normalizer = normalizers.NFC() if kind == "nfc" else None
        regex = pre_tokenizers.Split(Regex(SPLIT if kind == "regex" else SPLIT.replace("{1,3}", "")), "isolated")
        made.pre_tokenizer = level if kind == "bytes" else pre_tokenizers.Sequence([regex, level])
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
        return made
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    about = json.loads(made.to_str())
    vocab = about["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    made = Tokenizer.from_str(json.dumps(about))
    if kind == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = None
    return made


class Generator:
    """Draws records, each with the messages that it stands for and the numbers of those that are learned."""

    def __init__(self, name: str) -> None:
        self.form, self.draw = FORMS[name], random.Random(f"20261127 {name}")

    def chance(self, of: float) -> bool:
        return self.draw.random() < of

    def text(self, empty: float = 0.02) -> str:
        if self.chance(empty):
            return self.draw.choice(["", " ", "\n"])
        parts = [self.draw.choice(WORDS) for _ in range(self.draw.randrange(1, 5))]
        if self.chance(0.05):
            parts[self.draw.randrange(len(parts))] = self.draw.choice([*self.form.special.split(), "<think>"])
        text = " ".join(parts)
        return self.draw.choice([" ", "\n", "  \n", "\t"]) + text + " " if self.chance(0.15) else text

    def answer(self) -> dict[str, Any]:
        if "reasoning" in self.form.can and self.chance(0.15):
            return {"role": "assistant", "content": self.text(), "reasoning_content": self.text()}
        thought = f"<think>\n{self.text()}\n</think>\n\n" if self.chance(0.15) else ""
        return {"role": "assistant", "content": thought + self.text()}

    def called(self) -> Messages:
        """A turn of the assistant that calls functions, and what they give."""
        many = 2 if self.chance(0.2) else 1
        arguments = {"at": self.text(), "größe": self.draw.choice([1, 2.50, 1e-7, None, True, [1, {"a": "é"}]])}
        given = json.dumps(arguments) if "reasoning" in self.form.can and self.chance(0.3) else arguments
        calls = [{"id": f"call{n:05}", "type": "function", "function": {"name": f"f{n}", "arguments": given}}
                 for n in range(many)]  # fmt: skip
        content = {"content": self.draw.choice(["", None, self.text()])} if self.chance(0.8) else {}
        role = "ipython" if "ipython" in self.form.can and self.chance(0.3) else "tool"
        found = [{"role": role, "content": self.text(), "name": f"f{n}"} for n in range(many)]
        return [{"role": "assistant", **content, "tool_calls": calls}, *found]

    def messages(self, tools: bool) -> Messages:
        found: Messages = [{"role": "system", "content": self.text()}] if self.chance(0.3) else []
        turns, at = self.draw.randrange(1, 8), 1 if self.chance(0.06) else 0
        for number in range(at, max(turns, 2 - at) + at):
            if number % 2 == 0 or self.chance(0.02):
                found.append({"role": "user", "content": self.text(0.08)})
            else:
                found += [*(self.called() if tools and self.chance(0.4) else []), self.answer()]
        if not any(message["role"] == "assistant" for message in found):
            found.append(self.answer())
        for message in found if "parts" in self.form.can and self.chance(0.1) else []:
            message["content"] = [{"type": "text", "text": message["content"]}]
        return found

    def pair(self, alpaca: bool) -> tuple[dict[str, Any], Messages]:
        """A record of a prompt with its answer, and its messages."""
        asked, extra, answer, system = (self.text(empty) for empty in (0, 0.5, 0, 0))
        file: dict[str, Any] = {"prompt": asked, "response": answer}
        turns = [asked, answer]
        if alpaca:
            file = {"instruction": asked, "input": extra, "output": answer, "id": 7}
            file["history"] = [[self.text(0), self.text(0)]] if self.chance(0.3) else []
            turns = [
                *(text for pair in file["history"] for text in pair),
                f"{asked}\n\n{extra}" if extra.strip() else asked,
                answer,
            ]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
        if self.chance(0.7):
            return file, messages
        return file | {"system": system}, [{"role": "system", "content": system}, *messages]

    def record(self) -> dict[str, Any]:
        """`file`: the record as it is written; `messages`, `tools`, `documents`; `excluded`: turns not to learn."""
        kind = self.draw.choice(["messages"] * 4 + ["conversations"] * 2 + ["prompt", "alpaca"])
        made: dict[str, Any] = {"tools": None, "documents": None, "excluded": []}
        if kind in ("prompt", "alpaca"):
            file, messages = self.pair(kind == "alpaca")
            return made | {"file": file, "messages": messages}
        tools = "tools" in self.form.can and self.chance(0.4)
        messages = self.messages(tools)
        if kind == "conversations":
            messages = [called(message) for message in messages]
        own = [shared(message) if kind == "conversations" else dict(message) for message in messages]
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and self.chance(0.1):
                mark = self.draw.choice([{"weight": 0}, {"train": False}, {"weight": 1}])
                own[number] |= mark
                made["excluded"] += [] if mark == {"weight": 1} else [number]
        if tools:
            schema = {"type": "object", "properties": {"größe": {"type": "number", "default": None}}, "required": []}
            functions = [{"name": f"f{n}", "description": self.text(), "parameters": schema} for n in range(2)]
            made["tools"] = [{"type": "function", "function": one} for one in functions[self.draw.randrange(2) :]]
        if "documents" in self.form.can and self.chance(0.3):
            made["documents"] = [{"title": self.draw.choice(["", "Straße"]), "text": self.text()} for _ in range(2)]
        context = {name: made[name] for name in ("tools", "documents") if made[name]}
        return made | {"file": {kind: own, **context}, "messages": messages}


def called(message: dict[str, Any]) -> dict[str, Any]:
    """What of a message with calls ShareGPT's form can say."""
    if "tool_calls" not in message:
        return {key: "tool" if value == "ipython" else value for key, value in message.items() if key != "name"}
    functions = [call["function"] for call in message["tool_calls"]]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}


def shared(message: dict[str, Any]) -> dict[str, Any]:
    """The message in ShareGPT's form."""
    if "tool_calls" in message:
        calls = [call["function"] for call in message["tool_calls"]]
        return {"from": "function_call", "value": json.dumps(calls if len(calls) > 1 else calls[0])}
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {"from": names.get(message["role"], message["role"]), "value": message["content"], **rest}


REFERENCE = """
import json, sys
sys.path.append(sys.argv[1])  # for sentencepiece and protobuf, if this Python has none
from functools import cache
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

def common(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

def turns(tokenizer, twin, messages, tools, documents):
    how = {"tools": tools, "documents": documents, "date_string": "26 Jul 2024"}
    @cache
    def text(count, prompt=False):
        try:
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt, **how)
        except Exception:
            return None
    try:
        whole = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:
        return {"refused": repr(error)}
    clean = [{k: v for k, v in m.items() if v is not None} for m in messages]
    found, placed = render_jinja_template([clean], chat_template=twin, return_assistant_tokens_mask=True, **how,
                                          **tokenizer.special_tokens_map)
    assistants = [number for number, m in enumerate(messages) if m["role"] == "assistant"]
    assert found == [whole] and len(placed[0]) == len(assistants), (found, whole, placed)
    spans, marked = [], "generation %}" in tokenizer.chat_template
    for number, (start, stop) in zip(assistants, placed[0]):
        if not marked:
            before, prompt, through = text(number), text(number, True), text(number + 1)
            if None not in (before, prompt) and common(whole, prompt) >= len(before.rstrip()):
                start = common(whole, prompt)
            if through is not None and whole.startswith(through):
                stop = len(through.rstrip())
        spans.append((start, stop))
    coded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=marked, return_dict=True,
                                          tokenizer_kwargs={"return_offsets_mapping": True}, **how)
    return {"text": whole, "ids": coded["input_ids"], "spans": spans, "offsets": coded["offset_mapping"],
            "mask": coded.get("assistant_masks")}

found = {}
for folder, (twin, records) in json.load(sys.stdin).items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found[folder] = [turns(tokenizer, twin, *record) for record in records]
json.dump(found, sys.stdout)
"""
"""What transformers makes of conversations: ids with their offsets, and which characters each turn of the assistant
has. A turn begins where its prompt ends, and ends where the text up to it does; where the template changes what came
before, it is what stands between ⟦ and ⟧."""
Tokens = tuple[list[int], list[int]]
"""The tokens of a row, and its targets."""


def reference(place: Path, records: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    job = {}
    for name, form in FORMS.items():
        folder(place / name, form)
        own = [(one["messages"], one["tools"], one["documents"]) for one in records[name]]
        job[str(place / name)] = (form.template.replace("⟦", BEGIN).replace("⟧", END), own)
    command = [PYTHON, "-c", REFERENCE, str(Path(np.__file__).parents[1])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(folder).name: found for folder, found in json.loads(done.stdout).items()}


def wanted(record: dict[str, Any], expected: dict[str, Any]) -> Tokens:
    """By transformers. A token is learned if it has a character of a turn; the first one is no target."""
    turns = [number for number, message in enumerate(record["messages"]) if message["role"] == "assistant"]
    spans = [span for turn, span in zip(turns, expected["spans"], strict=True) if turn not in record["excluded"]]
    mask = [any(begin < stop and end > start for start, stop in spans) for begin, end in expected["offsets"]]
    if expected["mask"] is not None and not record["excluded"]:
        mask = expected["mask"]
    ids = expected["ids"]
    return ids[:-1], [one if learned else -1 for one, learned in zip(ids[1:], mask[1:], strict=True)]


def rows(folder: Path, records: list[dict[str, Any]]) -> list[Tokens]:
    """By dtrain: of each record that has a target."""
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(record["file"]) + "\n" for record in records))
    data = Chat(files=(str(file),), tokenizer=str(folder), length=4096, test=0.0, cache="", pack=False)
    source = data.open("train")
    batch = source.rows(np.arange(len(source)))
    sizes = (batch["document"] == 0).sum(1)
    return [(batch["token"][n, :size].tolist(), batch["target"][n, :size].tolist()) for n, size in enumerate(sizes)]


def differences(folder: Path, records: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """What dtrain reads differently, in a few lines."""
    lines, pairs = [], []
    for record, expected in zip(records, found, strict=True):
        if "refused" not in expected:
            pairs.append((record, expected))
            continue
        with pytest.raises(DataError) as refused:
            rows(folder, [record])
        if "no record for" in str(refused.value):
            lines.append(f"not refused as by transformers ({expected['refused']}): {record['file']}")
    while len(lines) < MOST:
        try:
            got = rows(folder, [record for record, _ in pairs])
            break
        except DataError as error:
            line = re.search(r"chat\.jsonl:(\d+)", str(error))
            assert line, error
            lines.append(f"refused: {error}: {pairs.pop(int(line[1]) - 1)[0]['file']}")
    else:
        return lines
    made = [(record, wanted(record, expected), expected) for record, expected in pairs if not blank(record)]
    made = [one for one in made if max(one[1][1], default=-1) >= 0]
    assert len(got) == len(made), f"{folder.name}: {len(got)} records are learned, not {len(made)}"
    for ours, (record, theirs, expected) in zip(got, made, strict=True):
        if ours != theirs:
            what = "what is learned" if ours[0] == theirs[0] else "ids"
            lines.append(f"{what}: {record['file']}: {expected['text']!r}\n{ours}\n{theirs}")
    return lines[:MOST]


def blank(record: dict[str, Any]) -> bool:
    """Whether nothing is said in it: dtrain leaves such a record out, and counts it."""
    return not any(str(m.get("content") or "").strip() or m.get("tool_calls") for m in record["messages"])


KNOWN = {"mistral": 42}
"""Records of a form that are refused: in this one tools and system prompts stand before the last turn of the user,
wherever that is, so that calls of earlier turns cannot be located."""


def test_chat_data_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    records = {name: [one.record() for _ in range(RECORDS)] for name in FORMS for one in [Generator(name)]}
    found = reference(tmp_path, records)
    lines = {name: differences(tmp_path / name, records[name], found[name]) for name in FORMS}
    report = "\n".join(f"{name}: {line[:2000]}" for name, several in lines.items() for line in several[:3])
    assert {name: len(several) for name, several in lines.items() if several} == KNOWN, report
