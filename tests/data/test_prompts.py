"""Prompts from files: texts, conversations with tools, records of training data, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtrain.core.errors import DataError
from dtrain.data.chat import Chat
from dtrain.data.prompts import Prompt, PromptReader
from dtrain.inference.texts import TextGenerator

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
USER = {"role": "user", "content": "Add 1 2"}
ANSWER = {"role": "assistant", "content": "3"}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prompts(folder: Path, *found: dict[str, Any], **how: Any) -> list[Prompt]:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    return PromptReader(**how).read(path)


def asked(messages: Any = (USER,), expected: Any = None, **context: Any) -> tuple[Any, ...]:
    return "", tuple(messages), context, expected


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Add 1 2"}, ("Add 1 2", (), {}, None)),
        ({"text": "Add 1 2"}, ("Add 1 2", (), {}, None)),
        ({"prompt": "Add 1 2", "response": "3", "id": 7}, ("Add 1 2", (), {}, "3")),
        ({"prompt": "Add 1 2", "chosen": "3", "rejected": "4"}, ("Add 1 2", (), {}, None)),
        ({"prompt": "Add 1 2", "system": "S"}, asked([{"role": "system", "content": "S"}, USER])),
        ({"prompt": [USER]}, asked()),
        ({"prompt": [USER], "completion": [ANSWER]}, asked(expected="3")),
        ({"messages": [USER]}, asked()),
        ({"messages": [USER, ANSWER]}, asked(expected="3")),
        ({"messages": [USER, ANSWER, USER]}, asked([USER, ANSWER, USER])),
        ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": TOOLS}]}, asked(expected=TOOLS)),
        ({"messages": json.dumps([USER]), "tools": json.dumps(TOOLS)}, asked(tools=TOOLS)),
        (
            {"conversations": [{"from": "human", "value": "Add 1 2"}, {"from": "gpt", "value": "3"}]},
            asked(expected="3"),
        ),
        ({"instruction": "Add 1 2"}, asked()),
        ({"instruction": "Add 1 2", "output": "3"}, asked(expected="3")),
        ({"instruction": "Add", "input": "1 2"}, asked([{"role": "user", "content": "Add\n\n1 2"}])),
        ({"question": "Add 1 2", "answer": "3"}, asked(expected="3")),
    ],
)
def test_each_form_of_a_prompt_is_read(tmp_path: Path, record: dict[str, Any], expected: tuple[Any, ...]) -> None:
    (read,) = prompts(tmp_path, record)
    assert (read.text, read.messages, dict(read.context), read.expected) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"promt": "a"}, "p.jsonl:1: has no prompt; it has 'promt'"),
        ({"prompt": 3}, "prompt is int, not text"),
        ({"messages": []}, "has no message to answer"),
        ({"messages": [ANSWER]}, "has no message to answer"),
        ({"messages": [{"role": "user"}]}, "message 1 .user. has no content"),
        ({"prompt": "a", "images": ["a.png"]}, "images is not supported"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompts(tmp_path, record)


def test_files_that_are_no_prompts_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("p.txt", "\n\n", "has no prompt"), ("p.csv", "prompt\na\n", "a table is no file of prompts"),
        ("p.jsonl", "", "has no prompt"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            PromptReader().read(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        PromptReader().read(tmp_path / "none.txt")


def test_what_is_expected_is_shown_beside_the_prompt(tmp_path: Path) -> None:
    text, talk, none = prompts(
        tmp_path, {"prompt": "a", "response": "b"}, {"messages": [USER, ANSWER]}, {"prompt": "a"}
    )
    assert text.shown() == {"prompt": "a", "expected": "b"}
    assert talk.shown() == {"messages": [USER], "expected": "3"}
    assert none.shown() == {"prompt": "a"}


def test_lines_of_a_text_are_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n{two\n")
    assert [(one.text, one.where[-7:]) for one in PromptReader().read(tmp_path / "p.txt")] == [
        ("one", "p.txt:1"), ("{two", "p.txt:3")
    ]  # fmt: skip


def test_names_of_the_training_data_are_those_of_prompts_where_they_are(tmp_path: Path) -> None:
    how: dict[str, Any] = {"fields": {"instruction": "ask", "output": "reply"}, "roles": {"bob": "assistant"}}
    renamed, usual = prompts(tmp_path, {"ask": "Add 1 2"}, {"instruction": "Add 1 2", "output": "3"}, **how)
    assert renamed.messages == usual.messages == (USER,)
    (talk,) = prompts(tmp_path, {"messages": [USER, {"role": "bob", "content": "3"}]}, **how)
    assert (talk.messages, talk.expected) == ((USER,), "3")


def texts(folder: Path, template: str = TEMPLATE) -> TextGenerator:
    (folder / "template.jinja").write_text(template)
    data = Chat(files=("none.jsonl",), length=16, template=str(folder / "template.jinja"))
    recipe = SimpleNamespace(data=SimpleNamespace(main=data))
    return TextGenerator(cast(Any, SimpleNamespace(recipe=recipe, tokenizer=data.open_tokenizer())))


def test_a_conversation_is_asked_with_its_tools_and_calls(tmp_path: Path) -> None:
    model = texts(tmp_path)
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    result = {"role": "tool", "content": "3"}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": [USER, called, result], "tools": TOOLS, "mood": "good"}))
    (read,) = model.prompts(path)
    ids = model.chat(read.messages, read.where, read.context)
    assert bytes(ids).decode() == "[add]<user>Add 1 2;<assistant>!add;<tool>3;<assistant>"
    assert model.account.of("unknown") == {"mood": 1}
    assert read.shown() == {"messages": [USER, called, result], "tools": TOOLS}


@pytest.mark.parametrize(
    ("messages", "context", "message"),
    [
        ([USER], {"tools": TOOLS}, "p:1: has tools, which the chat template does not write"),
        (
            [USER, {**ANSWER, "tool_calls": TOOLS}, USER],
            {},
            "a message has tool_calls, which the chat",
        ),
        ([{"role": "narrator", "content": "a"}, USER], {}, "a message of the role 'narrator'"),
    ],
)
def test_what_the_template_would_leave_out_is_refused(
    tmp_path: Path, messages: Any, context: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        texts(tmp_path, "{% for m in messages %}{{ m.content }};{% endfor %}").chat(messages, "p:1", context)
