"""Every field of a record is used, named, or refused: what others write around their conversations."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dtrain.core.errors import DataError
from dtrain.data import conversations
from dtrain.data.preference import Preference
from dtrain.data.questions import read_questions
from dtrain.data.records import record_files
from dtrain.data.templates import Template
from dtrain.data.tokenizer import open_tokenizer
from dtrain.data.tokenizer_folder import CLASS_TOKENS
from tests.data.test_chat import TALK, chat, learned

ASKED = {"role": "user", "content": "ask"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rendered(folder: Path, *records: Any, template: str = TEMPLATE, **how: Any) -> list[str]:
    """The text of each row, what counts in the loss in brackets."""
    (folder / "t.jinja").write_text(template)
    data = chat(folder, *records, template=str(folder / "t.jinja"), pack=False, length=512, **how)
    rows, texts = data.open("train").rows(np.arange(len(data.open("train")))), []
    for token, target in zip(rows["token"].tolist(), rows["target"].tolist(), strict=True):
        after = [*token[1:], 0]
        text, open_ = chr(token[0]), False
        for one, aim in zip(after, target, strict=True):
            text += ("⟦" if aim >= 0 and not open_ else "⟧" if aim < 0 and open_ else "") + chr(
                aim if aim >= 0 else one
            )
            open_ = aim >= 0
        texts.append(text.rstrip("\0"))
    return texts


@pytest.mark.parametrize(
    ("record", "text"),
    [
        # tools and documents of a record reach the template, as lists or as JSON text
        ({"messages": [ASKED, CALLED], "tools": TOOLS}, f"[{json.dumps(TOOLS)}]<user>ask;<assistant>⟦CALL;⟧"),
        ({"messages": [ASKED, CALLED], "tools": json.dumps(TOOLS)},
         f"[{json.dumps(TOOLS)}]<user>ask;<assistant>⟦CALL;⟧"),
        ({"messages": TALK[:2], "documents": [{"text": "d"}]}, "(d)<user>Hi;<assistant>⟦Hello you;⟧"),
        ({"messages": TALK[:2], "tools": [], "documents": None}, "<user>Hi;<assistant>⟦Hello you;⟧"),
        # a system prompt beside the messages, and alpaca's history
        ({"system": "S", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         "<system>S;<user>a;<assistant>⟦b;⟧"),
        ({"system": "S", "messages": [{"role": "system", "content": "S"}, *TALK[:2]]},
         "<system>S;<user>Hi;<assistant>⟦Hello you;⟧"),
        ({"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]},
         "<user>a;<assistant>⟦b;⟧<user>c;<assistant>⟦d;⟧"),
        # ShareGPT's calls of functions and what they return
        ({"conversations": [{"from": "human", "value": "ask"},
                            {"from": "function_call", "value": json.dumps(CALL["function"])},
                            {"from": "observation", "value": "r"}, {"from": "gpt", "value": "b"}]},
         "<user>ask;<assistant>⟦CALL;⟧<tool>r;<assistant>⟦b;⟧"),
        # marks on single turns
        *(({"messages": [TALK[0], TALK[1] | mark, *TALK[2:]]},
           "<user>Hi;<assistant>Hello you;<user>Bye;<assistant>⟦So soon;⟧")
          for mark in ({"weight": 0}, {"train": False}, {"trainable": False}, {"loss_mask": 0})),
        ({"messages": [TALK[0], TALK[1] | {"weight": 1}]}, "<user>Hi;<assistant>⟦Hello you;⟧"),
        # a conversation that begins with the assistant
        ({"messages": [TALK[1], *TALK[2:]]}, "<assistant>⟦Hello you;⟧<user>Bye;<assistant>⟦So soon;⟧"),
    ],
)  # fmt: skip
def test_what_stands_in_a_record_reaches_the_template(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    assert rendered(tmp_path, record) == [text.replace("CALL", json.dumps(CALL["function"]))]


def test_marked_turns_are_left_out_where_all_tokens_are_learned(tmp_path: Path) -> None:
    record = {"messages": [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]}
    assert rendered(tmp_path, record, learn="all") == [
        "<⟦user>Hi;<assistant>⟧Hello you;⟦<user>Bye;<assistant>So soon;⟧"
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [ASKED, TALK[1] | {"weight": 0.5}]}, "message 2: weight is 0.5"),
        ({"messages": [ASKED | {"train": True}, TALK[1]]}, r"message 1 \(user\): train asks to learn it"),
        ({"messages": TALK, "images": ["a.png"]}, "images is not supported"),
        ({"messages": TALK, "loss_mask": [0, 1]}, "loss_mask is not supported"),
        ({"messages": TALK, "functions": TOOLS}, "functions is not supported"),
        ({"messages": TALK, "chosen": "x"}, "chosen is not supported"),
        ({"prompt": "a", "completion": "b", "label": False}, "label is not supported"),
        ({"messages": TALK, "tools": "no json"}, "tools is text, but no JSON"),
        ({"messages": TALK, "tools": {"a": 1}}, "tools is not a list of objects"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}, *TALK]}, "has two system prompts"),
        ({"instruction": "a", "output": "b", "history": "x"}, "history is not a list of pairs"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, TALK[1]]}, "has a part of type 'image'"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "no"}]}, "is no call"),
        ({"messages": [{"role": "narrator", "content": "a"}, *TALK]}, "the role 'narrator', which is not known"),
    ],
)
def test_what_matters_and_is_not_read_is_refused(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"chat.jsonl:1: .*{message}|chat.jsonl:1: {message}"):
        rendered(tmp_path, record)


def test_what_the_template_does_not_write_is_refused_unless_ignored(tmp_path: Path) -> None:
    template = TEMPLATE[TEMPLATE.index("{% for m in") :].replace("m.tool_calls or []", "[]").replace("c.function", "1")
    for record, name in (
        ({"messages": TALK[:2], "tools": TOOLS}, "tools"),
        ({"messages": [*TALK[:2], CALLED]}, "tool_calls"),
        ({"messages": [TALK[0], TALK[1] | {"reasoning_content": "hm"}]}, "reasoning_content"),
    ):
        with pytest.raises(DataError, match=f"has {name}, which the chat template does not write") as refused:
            rendered(tmp_path, record, template=template)
        assert f"data.ignore: [{name}]" in str(refused.value.hint)
        assert rendered(tmp_path, record, template=template, ignore=(name,))[0].startswith("<user>Hi;")


def test_a_usual_name_that_is_misspelt_is_refused(tmp_path: Path) -> None:
    record = {"q": "a", "messages": TALK[:2]}
    with pytest.raises(DataError, match=r"data\.fields: 'prmpt' is no usual name of a field") as refused:
        rendered(tmp_path, record, fields={"prmpt": "q"})
    assert refused.value.hint == "did you mean prompt?"
    developer = {"messages": [{"role": "developer", "content": "be kind"}, *TALK[:2]]}
    with pytest.raises(DataError, match="the role 'developer'") as refused:
        rendered(tmp_path, developer)
    assert "{developer: system}" in str(refused.value.hint)


def test_roles_may_have_other_names(tmp_path: Path) -> None:
    record = {"messages": [{"role": "narrator", "content": "a"}, {"role": "bob", "content": "b"}]}
    assert rendered(tmp_path, record, roles={"narrator": "user", "bob": "assistant"}) == ["<user>a;<assistant>⟦b;⟧"]


def test_fields_that_are_not_used_are_named_once_also_from_the_cache(tmp_path: Path) -> None:
    record = {"id": 1, "difficulty": 3, "messages": [TALK[0] | {"mood": "x"}, TALK[1]]}
    for _ in range(2):
        notes = chat(tmp_path, record, record).open("train").notes
        assert notes[1:] == [
            "1 distinct record, the others are copies",
            "messages: 2 of assistant, 2 of user",
            "answers end with '\\x00' (2)",
            "fields of records that are not used: 'difficulty' (2)",
            "fields of messages that the template does not use: 'mood' (2)",
            "fields of records that change nothing: 'id' (2)",
        ]


def test_no_name_is_known_twice() -> None:
    assert not conversations.IGNORED.keys() & conversations.REFUSED.keys()
    assert all(conversations.IGNORED.values()) and all(conversations.REFUSED.values())


def test_nulls_that_arrow_fills_in_are_left_out(tmp_path: Path) -> None:
    def calling(arguments: dict[str, str]) -> dict[str, Any]:
        return {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]}

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([calling({"city": "Bern"}), calling({"zone": "CET"})]), path)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    data = chat(tmp_path, TALK, template=str(tmp_path / "t.jinja"), pack=False, length=128)
    data = type(data)(**{**data.__dict__, "files": (str(path),)})
    texts = ["".join(map(chr, row)) for row in data.open("train").rows(np.arange(2))["token"].tolist()]
    assert '{"arguments": {"city": "Bern"}}' in texts[0] and '{"arguments": {"zone": "CET"}}' in texts[1]


def pairs(folder: Path, record: Any) -> Preference:
    """Preference data of one record."""
    (folder / "p.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "t.jinja").write_text(TEMPLATE)
    return Preference(
        files=(str(folder / "p.jsonl"),), length=512, template=str(folder / "t.jinja"), test=0.0,
        cache=str(folder / "cache"),
    )  # fmt: skip


def preferred(folder: Path, record: Any) -> list[str]:
    """The two conversations of a pair."""
    rows = pairs(folder, record).open("train").rows(np.arange(1))
    return ["".join(map(chr, rows["token"][0][rows["document"][0] == n].tolist())) for n in range(2)]


def test_a_pair_of_answers_has_its_system_prompt_and_tools(tmp_path: Path) -> None:
    record = {"system": "S", "prompt": "a", "chosen": "b", "rejected": "c", "tools": TOOLS, "score_chosen": 1}
    source = pairs(tmp_path, record).open("train")
    text = "".join(map(chr, source.rows(np.arange(1))["token"][0].tolist()))
    assert text.count(f"[{json.dumps(TOOLS)}]<system>S;<user>a;") == 2
    assert "fields of records that change nothing: 'score_chosen' (2)" in source.notes


def byte_tokenizer(folder: Path, *special: str, **config: Any) -> str:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    for name, values in config.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return str(folder)


END = "<|endoftext|>"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": END}},
        {"tokenizer_config": {"eos_token": {"content": END}}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": END}},
        {"special_tokens_map": {"eos_token": {"content": END, "lstrip": False}}},
        {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}},
        {"tokenizer_config": {"tokenizer_class": "GPT2TokenizerFast"}},
        {"config": {"model_type": "gpt2"}},
        {"config": {"eos_token_id": 256}},
        {"generation_config": {"eos_token_id": [256, 257]}},
    ],
)
def test_the_end_token_is_found_wherever_a_folder_states_it(tmp_path: Path, files: dict[str, Any]) -> None:
    opened = open_tokenizer(byte_tokenizer(tmp_path / "t", END, "<s>", **files))
    assert opened.special["eos_token"] == END


def test_all_tokens_of_the_configuration_reach_the_template(tmp_path: Path) -> None:
    config = {"pad_token": "<p>", "extra_special_tokens": {"image_token": "<i>"}, "additional_special_tokens": ["<a>"]}
    folder = byte_tokenizer(tmp_path / "t", "<p>", "<i>", "<a>", tokenizer_config=config)
    assert open_tokenizer(folder).special == {
        "pad_token": "<p>",
        "image_token": "<i>",
        "additional_special_tokens": ["<a>"],
    }


def test_a_template_that_writes_a_token_which_no_file_names_is_refused(tmp_path: Path) -> None:
    folder = byte_tokenizer(tmp_path / "t", END, tokenizer_config={})
    for template in (
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "{{ messages[0].content + bos_token }}",
    ):
        with pytest.raises(DataError, match=r"(eos|bos)_token"):
            rendered(tmp_path, {"messages": TALK}, template=template, tokenizer=folder)
    template = "{% for m in messages %}{{ m.content }}{% if eos_token is defined %}!{% endif %}{% endfor %}"
    assert rendered(tmp_path, {"messages": TALK}, template=template, tokenizer=folder)


def test_a_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": TEMPLATE.replace("tools", "none")},
        {"name": "tool_use", "template": TEMPLATE},
    ]
    folder = byte_tokenizer(tmp_path / "t", END, tokenizer_config={"chat_template": named})
    data = chat(
        tmp_path,
        {"messages": TALK, "tools": TOOLS},
        {"messages": TALK},
        tokenizer=folder,
        template=None,
        pack=False,
        length=512,
    )
    texts = [open_tokenizer(folder).decode(row) for row in data.open("train").rows(np.arange(2))["token"].tolist()]
    assert texts[0].startswith("[[{") and texts[1].startswith("<user>")


def test_plain_texts_that_have_begin_and_end_get_no_second_one(tmp_path: Path) -> None:
    assert learned(chat(tmp_path, {"text": "ab\0"}, {"text": "ab"})) == ["b\0b\0"]


def test_the_prompt_may_end_with_more_than_the_turn_begins_with(tmp_path: Path) -> None:
    template = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>¿{% endif %}")
    assert rendered(tmp_path, {"messages": TALK[:2]}, template=template) == ["<user>Hi;<assistant>⟦Hello you;⟧"]


def test_what_a_template_writes_after_the_last_turn_alone_is_of_that_turn_alone() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% else %}<|stop|>{% endif %}"
    talk = [TALK[0], TALK[1] | {"content": "Hello  "}, *TALK[2:]]
    found = Template(template).rendered(talk, "here")
    assert [found.text[slice(*span)] for span in found.spans] == ["Hello  <|end|>", "So soon<|end|>\n<|stop|>"]


def test_an_earlier_turn_may_be_written_without_its_reasoning() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content.split('#')[-1] }}<|end|>"
    )
    template += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    talk = [TALK[0], TALK[1] | {"content": "think#Hello"}, TALK[2], TALK[3] | {"content": "hm#So soon"}]
    found = Template(template).rendered(talk, "here")
    assert [found.text[slice(*span)] for span in found.spans] == ["Hello<|end|>", "hm#So soon<|end|>"]


def test_every_class_names_tokens_that_end_texts() -> None:
    assert all("eos_token" in tokens for tokens in CLASS_TOKENS.values())


def test_sentencepiece_learns_the_characters_of_the_answer_in_any_script(tmp_path: Path) -> None:
    import sentencepiece

    texts = ["日本語の質問です。", "長い答えです。", "été à la plage", "user assistant"] * 60
    (tmp_path / "t.txt").write_text("\n".join(texts))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"), model_prefix=str(tmp_path / "m"), vocab_size=330, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity", model_type="bpe",
    )  # fmt: skip
    opened = open_tokenizer(str(tmp_path / "m.model"))
    asked, answer = "日本語の質問 été 🙂: ", "長い答え à 🙂。"
    ((tokens, inside),) = opened.encode_with_spans([(asked + answer, [(len(asked), len(asked + answer))])])
    assert opened.decode(tokens[inside].tolist()).strip() == answer
    assert opened.decode(tokens[~inside].tolist()).strip() == asked.strip()


def test_the_calls_of_an_earlier_turn_are_learned() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ '#' if loop.last and m.role == 'assistant' }}{{ m.content }}"
    template += "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    talk = [ASKED, CALLED | {"content": "I look"}, {"role": "tool", "content": "it"}, TALK[1]]
    found = Template(template).rendered(talk, "here")
    assert [found.text[slice(*span)] for span in found.spans] == ["I look[look]<|end|>", "#Hello you<|end|>"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "response": "b", "context": "c"}, "context is not supported"),
        ({"prompt": "a", "response": "b", "input": "c"}, "input is not supported"),
        ({"messages": TALK, "system_prompt": "s"}, "system_prompt is not supported"),
        ({"messages": TALK, "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs is not supported"),
        ({"messages": [TALK[0] | {"from": "gpt"}, TALK[1]]}, "message 1 has role and from, which differ"),
        ({"messages": [TALK[0], TALK[1] | {"value": "x"}]}, "message 2 has content and value, which differ"),
    ],
)
def test_what_would_change_the_row_and_is_not_read_is_refused(tmp_path: Path, record: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        chat(tmp_path, record).open("train")


def test_a_turn_marked_loss_false_is_not_learned(tmp_path: Path) -> None:
    talk = [TALK[0], TALK[1] | {"loss": False}, *TALK[2:]]
    assert rendered(tmp_path, {"messages": talk})[0].count("⟦") == 1


def test_a_message_may_repeat_its_role_in_the_words_of_sharegpt(tmp_path: Path) -> None:
    talk = [TALK[0] | {"from": "human", "value": TALK[0]["content"]}, *TALK[1:]]
    assert rendered(tmp_path, {"messages": talk}) == rendered(tmp_path, {"messages": TALK})


def test_parts_of_text_are_joined_for_a_template_that_takes_a_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    talk = [TALK[0] | {"content": parts}, TALK[1]]
    assert rendered(tmp_path, {"messages": talk}) == ["<user>Hi;<assistant>⟦Hello you;⟧"]


@pytest.mark.parametrize(
    "chosen",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b", "name": None}],
        [
            {"role": "system", "content": "S"},
            *({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"))),
        ],
    ],
)
def test_a_prompt_that_the_answer_repeats_is_written_once(tmp_path: Path, chosen: Any) -> None:
    record = {"prompt": "a", "chosen": chosen, "rejected": [*chosen[:-1], chosen[-1] | {"content": "c"}]}
    assert "".join(preferred(tmp_path, record)).count("<user>a;") == 2


def test_a_folder_of_several_splits_is_refused_and_caches_are_no_records(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "cache-1a.arrow", "state.json"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in record_files((str(tmp_path),))] == ["train-0.jsonl"]
    (tmp_path / "validation-0.jsonl").write_text("{}")
    with pytest.raises(DataError, match="files of several splits: train, validation"):
        record_files((str(tmp_path),))


def test_a_question_has_its_system_prompt_and_input(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"instruction": "Add", "input": "1 2", "system": "S", "answer": "3"}) + "\n")
    (question,) = read_questions((str(path),))
    assert [message["content"] for message in question.messages] == ["S", "Add\n\n1 2"]
    path.write_text(json.dumps({"prompt": "Add", "tools": TOOLS, "answer": "3"}) + "\n")
    assert read_questions((str(path),))[0].context == {"tools": TOOLS}
    path.write_text(json.dumps({"prompt": "Add", "images": ["a.png"], "answer": "3"}) + "\n")
    with pytest.raises(DataError, match="images is not supported"):
        read_questions((str(path),))


@pytest.mark.parametrize("text", [json.dumps(TALK[:2]), json.dumps(TALK[:2]).encode()])
def test_messages_may_be_json_text(tmp_path: Path, text: Any) -> None:
    read = conversations.conversation(("here", {"messages": text}), {})
    assert list(read.messages) == TALK[:2]


def test_calls_of_functions_may_be_json_text_or_the_older_field(tmp_path: Path) -> None:
    called = {name: value for name, value in CALLED.items() if name != "tool_calls"}
    older = called | {"content": None, "function_call": CALL["function"]}
    texts = [
        rendered(tmp_path, {"messages": [ASKED, message]})
        for message in (CALLED, called | {"tool_calls": json.dumps([CALL])}, older)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_prompt_of_messages_is_not_learned(tmp_path: Path) -> None:
    record = {"prompt": TALK[:3], "completion": [TALK[3]], "system": "S"}
    (text,) = rendered(tmp_path, record)
    assert text.count("⟦") == 1 and text.endswith("⟦So soon;⟧")


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"instruction": "Add", "context": "1 2", "response": "3"}, {"input": "context"}),
        ({"system_prompt": "S", "question": "Add", "response": "3"}, {"system": "system_prompt"}),
    ],
)
def test_records_as_dolly_and_orca_have_them(record: Any, fields: dict[str, str]) -> None:
    read = conversations.conversation(("here", record), fields)
    assert [message["content"] for message in read.messages] in (["Add\n\n1 2", "3"], ["S", "Add", "3"])


def test_a_content_of_null_reaches_templates_that_ask_for_it(tmp_path: Path) -> None:
    asks = "None, type;" + TEMPLATE.replace("{{ m.content }}", "{{ '-' if m.content is none else m.content }}")
    talk = [ASKED, CALLED | {"content": None}]
    assert "⟦-{" in rendered(tmp_path, {"messages": talk}, template=asks)[0]
    assert "⟦{" in rendered(tmp_path, {"messages": talk})[0]  # this one would write None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_known_by_its_names(tmp_path: Path, name: str) -> None:
    thinks = TEMPLATE.replace(
        "{{ m.content }}", "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    )
    assert "⟦(hm)Hello you;⟧" in rendered(tmp_path, {"messages": [TALK[0], TALK[1] | {name: "hm"}]}, template=thinks)[0]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [{"from": "human", "value": "q"}], "chosen": [{"from": "gpt", "value": "good"}],
         "rejected": [{"from": "gpt", "value": "bad"}]},
        {"prompt": "q", "chosen": [{"from": "human", "value": "q "}, {"from": "gpt", "value": "good"}],
         "rejected": [{"from": "human", "value": "q "}, {"from": "gpt", "value": "bad"}]},
        {"prompt": "q", "chosen": json.dumps([{"role": "assistant", "content": "good"}]),
         "rejected": json.dumps([{"role": "assistant", "content": "bad"}])},
        {"question": "q", "chosen": "good", "rejected": "bad"},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}},
        {"prompt": [{"role": "User", "content": "q"}], "chosen": [{"role": "AI", "content": "good"}],
         "rejected": [{"role": "Assistant", "content": "bad"}]},
    ],
)  # fmt: skip
def test_pairs_of_answers_in_other_forms(tmp_path: Path, record: Any) -> None:
    chosen, rejected = (text.replace("q ;", "q;") for text in preferred(tmp_path, record))
    assert chosen.startswith("<user>q;<assistant>good") and rejected.startswith("<user>q;<assistant>bad")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": [TALK[0] | {"content": "p1"}, TALK[1]], "rejected": [TALK[0] | {"content": "p2"}, TALK[3]]},
         "answer different conversations"),
        ({"prompt": "a", "chosen": [{"role": "system", "content": "S"}, ASKED, TALK[1]], "rejected": [ASKED, TALK[3]]},
         "answer different conversations"),
        ({"prompt": "Human: how are you? Assistant:", "chosen": "Human: how are you? Assistant: well",
          "rejected": "Human: how are you? Assistant: bad"}, "chosen begins with the whole prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "no record for"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "no record for"),
        ({"prompt": "a", "chosen": {"text": "b"}, "rejected": "c"}, "chosen is dict, not text"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is missing"),
    ],
)  # fmt: skip
def test_pairs_that_prefer_nothing_or_differ_before_the_answer(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        preferred(tmp_path, record)


@pytest.mark.parametrize("part", [{"type": "text", "content": "q"}, {"type": "text", "text": None}])
def test_a_part_without_its_text_is_refused(tmp_path: Path, part: Any) -> None:
    with pytest.raises(DataError, match="has a part of type 'text' without its text"):
        chat(tmp_path, {"messages": [TALK[0] | {"content": [part]}, TALK[1]]}).open("train")


def test_a_template_without_answers_and_marks_that_learn_all_ignores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not write what the assistant says"):
        rendered(tmp_path, {"messages": TALK}, template="{% for m in messages %}{{ m.role }}:{% endfor %}")
    with pytest.raises(DataError, match="a turn that is not the assistant's is marked"):
        chat(tmp_path, {"messages": [TALK[0] | {"weight": 0}, TALK[1]]}, learn="all").open("train")


def test_a_template_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert rendered(tmp_path, {"messages": TALK[:2]}, template="\ufeff" + TEMPLATE)[0].startswith("<user>")


def test_columns_of_bytes_and_times_are_named_or_refused(tmp_path: Path) -> None:
    times = pa.array([0], pa.timestamp("us"))
    for name, values in (("photo", pa.array([b"x"])), ("image", pa.array([b"x"]))):
        pa.parquet.write_table(pa.table({"messages": [TALK[:2]], "made": times, name: values}), tmp_path / "a.parquet")
        data = dataclasses.replace(chat(tmp_path), files=(str(tmp_path / "a.parquet"),))
        if name == "image":
            with pytest.raises(DataError, match="image is not supported"):
                data.open("train")
        else:
            assert any("'made' (1), 'photo' (1)" in line for line in data.open("train").notes)


def test_a_template_that_leaves_out_system_prompts_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'system' %}" + "<{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}"
    )
    data = chat(tmp_path, {"messages": TALK, "system": "S"}, template=str(tmp_path / "t.jinja"))
    assert any("content of system messages" in line for line in data.open("train").notes)


def test_an_end_token_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|nothere|>"}))
    with pytest.raises(DataError, match=r"has no token '<\|nothere\|>', which its folder names") as refused:
        chat(tmp_path, {"text": "ab"}, tokenizer=str(tmp_path)).open("train")
    assert "eos_token" in refused.value.hint


@pytest.mark.parametrize(("about", "spaces"), [({}, 1), ({"legacy": False}, 1), ({"legacy": True}, 2)])
def test_sentencepiece_writes_a_space_before_the_text_or_before_each_part(
    tmp_path: Path, about: dict[str, bool], spaces: int
) -> None:
    import sentencepiece

    (tmp_path / "t.txt").write_text("hi there you\n" * 60)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, model_type="bpe",
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    opened = open_tokenizer(str(tmp_path))
    ((tokens, _),) = opened.encode_with_spans([("hi</s>you", [])])
    texts = "".join(
        sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model")).id_to_piece(tokens.tolist())
    )
    assert texts.count("\u2581") == spaces and texts.startswith("\u2581hi</s>")
