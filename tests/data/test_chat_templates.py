"""Ids and what is learned of generated conversations, against transformers, for templates in public forms."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dtrain.core.errors import DataError
from dtrain.data.chat import Chat

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers"),
]
RECORDS = 500
SPECIAL = (
    "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>",
    "<|end|>", "<|system|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
)  # fmt: skip
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{{- m.content | trim }}" + CALLS + "{{- eos_token }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "chatml": (CHATML, {"eos_token": "<|im_end|>"}),
    "qwen3": (
        "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set text = m.content or '' %}"
        "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\n' + text }}" + CALLS + "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('must alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + (m.role if m.role == 'user' else 'model') + '\n' + m.content | trim"
        " + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        {"bos_token": "<bos>", "eos_token": "</s>"},
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + (m.content or '') + eos_token }}{% else %}"
        "{{ m.content + '\n\n' }}{% endif %}{% endfor %}",
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        {"eos_token": "<|endoftext|>"},
    ),
    "r1": (
        "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
        "{{- '<|assistant|>' + (m.content or '').split('</think>')[-1] + eos_token }}{%- else %}"
        "{{- '<|user|>' + m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}",
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gpt2": (
        "{% for m in messages %}{{ m.content or '' }}{{ eos_token }}{% endfor %}",
        {"tokenizer_class": "GPT2Tokenizer"},
    ),
}
WITH_TOOLS = ("chatml",)


def folder(place: Path, name: str) -> str:
    template, config = FORMS[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    (place / name).mkdir()
    made.save(str(place / name / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | config
    (place / name / "tokenizer_config.json").write_text(json.dumps(config))
    return str(place / name)


def conversations() -> list[tuple[list[dict[str, Any]], Any]]:
    """Messages and tools, drawn at random: with and without system prompts, tools, reasoning, and odd texts."""
    draw = random.Random(20261126)
    words = (
        "Bern",
        "ä ö ü",
        "  two  spaces ",
        "line\nbreak",
        "1+1=2",
        "<s>",
        "日本語",
        "🙂",
        "end.",
        "<think>",
        "a\tb",
    )

    def text() -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randrange(1, 5)))

    found = []
    for _ in range(RECORDS):
        messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
        for _ in range(draw.randrange(1, 4)):
            messages.append({"role": "user", "content": text()})
            answer = f"<think>\n{text()}\n</think>\n\n{text()}" if draw.random() < 0.2 else text()
            messages.append({"role": "assistant", "content": answer})
        if draw.random() < 0.2:
            messages.append({"role": "user", "content": text()})
        if draw.random() < 0.15:
            messages[-1 if messages[-1]["role"] == "assistant" else -2]["weight"] = 0
        tools = None
        if draw.random() < 0.15:
            tools = [{"type": "function", "function": {"name": "look", "parameters": {"at": text()}}}]
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": text()}}}
            messages += [
                {"role": "user", "content": text()},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            messages += [{"role": "tool", "content": text()}, {"role": "assistant", "content": text()}]
        found.append((messages, tools))
    return found


def reference(place: Path) -> dict[str, Any]:
    """What transformers makes of the conversations, with each tokenizer's folder."""
    records = conversations()
    job = {"folders": [folder(place, name) for name in FORMS], "records": records}
    script = Path(__file__).with_name("chat_reference.py")
    done = subprocess.run([PYTHON, str(script)], input=json.dumps(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {Path(name).name: (name, found) for name, found in json.loads(done.stdout).items()} | {"records": records}


@pytest.mark.nightly
def test_ids_and_what_is_learned_are_those_of_transformers(tmp_path: Path) -> None:
    found = reference(tmp_path)  # once: it takes longer than all that follows
    for name in FORMS:
        compare(name, found, tmp_path)


def compare(name: str, reference: dict[str, Any], tmp_path: Path) -> None:
    path, found = reference[name]
    kept, refused = [], []
    for (messages, tools), expected in zip(reference["records"], found, strict=True):
        if tools and name not in WITH_TOOLS:  # dtrain refuses what the template would leave out
            continue
        record = {"messages": messages} | ({"tools": tools} if tools else {})
        turns = [message for message in messages if message["role"] == "assistant"]
        if "refused" in expected:
            refused.append(record)
        elif spans := [s for turn, s in zip(turns, expected["spans"], strict=True) if turn.get("weight") != 0]:
            kept.append((record, expected, spans))
    assert len(kept) + len(refused) > RECORDS / 2

    def data(*records: Any) -> Chat:
        (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return Chat(files=(str(tmp_path / "c.jsonl"),), tokenizer=path, length=4096, test=0.0, cache="", pack=False)

    for record in refused[:20]:
        with pytest.raises(DataError):
            data(record).open("train")
    rows = data(*(record for record, _, _ in kept)).open("train").rows(np.arange(len(kept)))
    for token, target, (_, expected, spans) in zip(rows["token"], rows["target"], kept, strict=True):
        ids = expected["ids"]
        aims = target[: len(ids) - 1].tolist()
        assert [*token[: len(ids) - 1].tolist(), ids[-1]] == ids, expected["text"]
        assert all(aim in (-1, wanted) for aim, wanted in zip(aims, ids[1:], strict=True))
        learned = [any(begin < stop and end > start for start, stop in spans) for begin, end in expected["offsets"]]
        if all(stop >= 0 for _, stop in spans):  # else a turn is written differently when it is not the last
            assert [aim >= 0 for aim in aims] == learned[1:], (expected["text"], spans)
        assert any(aim >= 0 for aim in aims)
