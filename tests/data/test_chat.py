"""Conversations become rows: what counts in the loss, packing, the cache, and records that cannot be used."""

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from tokenizers.processors import TemplateProcessing

from dtrain.core.errors import DataError
from dtrain.data.chat import Chat
from dtrain.data.packed_rows import packed
from dtrain.data.templates import NAMED, Template
from dtrain.data.tokenizer import open_tokenizer
from dtrain.models.decoder import Decoder
from dtrain.models.nn.param import initial
from tests.conftest import SHARED
from tests.engines import loss_alone

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So soon"},
]
GSM8K = SHARED / "data" / "instruct" / "gsm8k_train.json"


def written(folder: Path, *records: Any, name: str = "chat.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def chat(folder: Path, *records: Any, **how: Any) -> Chat:
    how = {"template": "plain", "length": 64, "cache": str(folder / "cache"), "test": 0.0} | how
    return Chat(files=(written(folder, *records),), **how)


def learned(data: Chat) -> list[str]:
    """The text of the targets of each row; ~ where a token is no target."""
    rows = data.open("train").rows(np.arange(len(data.open("train"))))
    return ["".join("~" if token < 0 else chr(token) for token in row).rstrip("~") for row in rows["target"].tolist()]


def test_only_what_the_assistant_wrote_counts(tmp_path: Path) -> None:
    # the first token of a row is never a target
    assert learned(chat(tmp_path, {"messages": TALK}))[0] == "~Hello you\0~~~So soon\0"
    assert learned(chat(tmp_path, {"messages": TALK}, learn="all"))[0] == "iHello you\0ByeSo soon\0"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "ab", "response": "cd"}, "~cd\0"),
        ({"prompt": "ab", "completion": "cd"}, "~cd\0"),
        ({"instruction": "ab", "input": "", "output": "cd"}, "~cd\0"),
        ({"instruction": "ab", "input": "x", "output": "cd"}, "~~~~cd\0"),
        ({"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]}, "~cd\0"),
        ({"text": "abcd"}, "bcd\0"),
        ({"question": "ab", "answer": "cd", "other": 3}, "~cd\0"),
    ],
)
def test_every_usual_form_is_read(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    assert learned(chat(tmp_path, record)) == [text]


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    assert learned(chat(tmp_path, {"a": "ab", "b": "cd"}, fields={"prompt": "a", "response": "b"})) == ["~cd\0"]
    with pytest.raises(DataError, match=r"chat.jsonl:1: has no field 'c' .data.fields.; it has 'a', 'b'"):
        chat(tmp_path, {"a": "ab", "b": "cd"}, fields={"prompt": "a", "response": "c"}).open("train")


@pytest.mark.parametrize("how", ["jsonl", "gz", "json", "parquet", "arrow", "stream", "folder"])
def test_every_format_gives_the_same_rows(tmp_path: Path, how: str) -> None:
    records = [{"prompt": f"number {i}", "response": str(i) * 3} for i in range(20)]
    table, path = pa.Table.from_pylist(records), tmp_path / f"chat.{how}"
    if how in ("jsonl", "gz"):
        text = "\n".join(map(json.dumps, records)).encode()
        path = tmp_path / ("chat.jsonl" if how == "jsonl" else "chat.jsonl.gz")
        path.write_bytes(text if how == "jsonl" else gzip.compress(text))
    elif how == "json":
        path.write_text(json.dumps(records))
    elif how == "parquet":
        pa.parquet.write_table(table, path, row_group_size=7)
    else:  # `datasets` saves a folder with files in the stream format
        path = tmp_path / "saved" / "data.arrow"
        path.parent.mkdir()
        new = pa.ipc.new_file if how == "arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        path = path.parent if how == "folder" else path
    data = Chat(files=(str(path),), length=32, template="plain", cache=str(tmp_path / "cache"), test=0.0)
    same = chat(tmp_path, *records, length=32)
    ours, theirs = data.open("train"), same.open("train")
    indices = np.arange(len(theirs))
    assert all(np.array_equal(ours.rows(indices)[key], theirs.rows(indices)[key]) for key in ("token", "target"))


def test_packed_rows_hold_each_conversation_once(tmp_path: Path) -> None:
    records = [{"prompt": "p" * (1 + i % 7), "response": "r" * (1 + i % 11)} for i in range(60)]
    rows, apart = (chat(tmp_path, *records, length=40, pack=pack).open("train") for pack in (True, False))
    assert len(rows) < len(apart) == 60
    batch, single = rows.rows(np.arange(len(rows))), apart.rows(np.arange(60))
    pieces = []
    for token, document, position in zip(batch["token"], batch["document"], batch["position"], strict=True):
        for number in range(document.max() + 1):
            inside = document == number
            assert position[inside].tolist() == list(range(inside.sum()))
            pieces.append(bytes(token[inside].tolist()).rstrip(b"\0"))
    assert sorted(filter(None, pieces)) == sorted(bytes(row.tolist()).rstrip(b"\0") for row in single["token"])
    assert (batch["target"] >= 0).sum() == (single["target"] >= 0).sum()


def test_packing_is_tight_and_depends_on_the_sizes_alone() -> None:
    sizes = np.random.default_rng(0).integers(1, 101, 2000).tolist()
    rows = packed(sizes, 100)
    assert sorted(document for row in rows for document in row) == list(range(2000))
    assert max(sum(sizes[document] for document in row) for row in rows) <= 100
    assert len(rows) <= 1.02 * sum(sizes) / 100
    assert packed(sizes, 100) == rows


def test_the_same_records_are_held_out_however_they_are_packed(tmp_path: Path) -> None:
    records = [{"prompt": f"{i:03}", "response": "x"} for i in range(100)]

    def held(**how: Any) -> set[bytes]:
        source = chat(tmp_path, *records, test=0.2, pack=False, **how).open("test")
        return {bytes(row[:3].tolist()) for row in source.rows(np.arange(len(source)))["token"]}

    assert len(held()) == 20
    assert held() == held(length=32)
    assert held() != {f"{i:03}".encode() for i in range(20)}
    both = Chat(
        files=(written(tmp_path, *records),), length=64, template="plain", cache=str(tmp_path),
        test_files=(written(tmp_path, {"prompt": "a", "response": "b"}, name="test.jsonl"),), pack=False,
    )  # fmt: skip
    assert (len(both.open("train")), len(both.open("test"))) == (100, 1)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    records = [{"prompt": "a", "response": "b"}, {"prompt": "", "response": ""}, {"prompt": "x" * 99, "response": "y"}]
    assert chat(tmp_path, *records).open("train").notes == [
        "1 record in 1 row of 64 tokens, 3.1% filled; "
        "of the files' records 1 empty or without a target and 1 longer than a row",
        "messages: 2 of assistant, 2 of user",
        "answers end with '\\x00' (2)",
    ]
    cut = chat(tmp_path, {"prompt": "a", "response": "b" * 99}, too_long="cut")
    assert learned(cut) == ["b" * 64]
    assert learned(chat(tmp_path, {"text": "ab" * 50})) == ["ba" * 32, "ba" * 17 + "b\0"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1}', r"chat.jsonl:1: has none of the known fields; it has 'a'"),
        ("[1]", "chat.jsonl:1: is list, not an object with fields"),
        ("{", "chat.jsonl:1: is not JSON"),
        ('{"messages": "hi"}', "chat.jsonl:1: messages is text, but no JSON"),
        ('{"messages": "3"}', "chat.jsonl:1: messages is int, not a list"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "chat.jsonl:1: has no turn of the assistant"),
        ('{"messages": [{"content": "a"}]}', "chat.jsonl:1: message 1 has no role"),
        ('{"messages": [{"role": "assistant"}]}', r"message 1 .assistant. has no content"),
        ('{"prompt": 3, "response": "b"}', "prompt is int, not text"),
        ("", "chat.jsonl: no record for the train split"),
    ],
)
def test_records_that_cannot_be_used_are_refused(tmp_path: Path, line: str, message: str) -> None:
    data = chat(tmp_path)
    (tmp_path / "chat.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        data.open("train")
    assert not list((tmp_path / "cache").glob("tokens-*.bin")) or not line


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "the chat template is not valid"),
        ("{{ raise_exception('no system') }}", "chat.jsonl:1: the chat template fails: no system"),
        ("{{ messages.__class__.__mro__ }}", "the chat template fails: access to attribute"),
        ("{% for i in range(10**9) %}{% endfor %}", "the chat template fails: Range too big"),
        ("{{ strftime_now('%d') }}", "the chat template fails: 'strftime_now' is undefined"),
        ("{{ messages[0].role + 1 }}", "the chat template fails: can only concatenate"),
        ("{% for m in messages|reverse %}{{ m.content }}{% endfor %}", "changes earlier turns"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(DataError, match=message):
        chat(tmp_path, {"messages": TALK}, template=str(tmp_path / "mine.jinja")).open("train")


def spans(template: str, messages: list[dict[str, str]]) -> list[str]:
    rendered = Template(template, {"bos_token": "<s>", "eos_token": "</s>"}).rendered(messages, "here")
    return [rendered.text[start:stop] for start, stop in rendered.spans]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% break %}", "the chat template is not valid|fails"),
        ("{% for m in messages %}" * 100 + "{% endfor %}" * 100, "the chat template is not valid|fails"),
        ("{{ messages|random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ messages[0].keys }}", "prints the address of an object"),
        ("{{ 1 // 0 }}", "fails"),
    ],
)
def test_a_template_fails_as_data_and_says_the_same_in_every_process(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Template(template).rendered(TALK, "here")


def test_json_of_a_template_may_be_ascii() -> None:
    text = Template("{{ 'é' | tojson(ensure_ascii=true) }}{{ 'é' | tojson }}").prompt(TALK, "here")
    assert text == '"\\u00e9""é"'


def test_turns_are_found_in_every_kind_of_template() -> None:
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "alpaca": "</s>", "plain": "</s>"}
    for name, source in NAMED.items():
        assert spans(source, TALK) == [f"Hello you{ends[name]}", f"So soon{ends[name]}"]
        assert Template(source, {"bos_token": "", "eos_token": "</s>"}).ending() == ends[name]


@pytest.mark.parametrize(("inside", "learned"), [(True, "<|im_end|>"), (False, "")])
def test_an_end_that_is_not_learned_is_no_end_of_answers(inside: bool, learned: str) -> None:
    end = "<|im_end|>"
    marked = "{% generation %}{{ m.content }}" + end * inside + "{% endgeneration %}" + end * (not inside)
    answer = "{% if m.role == 'assistant' %}" + marked + "{% else %}{{ m.content }}" + end + "{% endif %}"
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + answer + "\n{% endfor %}"
    assert Template(source, {}).ending() == learned
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
    marked += "{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    assert spans(marked, TALK) == ["Hello you!", "So soon!"]
    # reasoning is kept in the last turn alone, as in Qwen 3
    last = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    last += "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    assert spans(last, TALK) == ["Hello you<end>", "<think></think>So soon<end>"]


def tokenizer(folder: Path, template: str | None) -> Path:
    """A byte-level BPE with special tokens, as a folder that Hugging Face's libraries read."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(["Hello you, so soon? Bye 🙂 hello again"] * 20, trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|end|>", "bos_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}
    about |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_the_template_and_special_tokens_come_with_the_tokenizer(tmp_path: Path) -> None:
    place = tokenizer(tmp_path / "t", NAMED["chatml"])
    talk = [{"role": "user", "content": "🙂 so"}, {"role": "assistant", "content": "Hi 🙂"}]
    data = chat(tmp_path, {"messages": talk}, template=None, tokenizer=str(place))
    own, batch = data.open_tokenizer(), data.open("train").rows(np.arange(1))
    target = batch["target"][0]
    assert own.decode(target[target >= 0].tolist()) == "Hi 🙂<|im_end|>"
    ids = batch["token"][0][batch["document"][0] == 0].tolist()
    assert ids.count(own.token_id("<|im_start|>")) == 2
    assert data.open("train").bytes_per_token == pytest.approx(len("Hi 🙂".encode()) / (target >= 0).sum())
    bare = tokenizer(tmp_path / "bare", None)
    with pytest.raises(DataError, match="bare has no chat template") as caught:
        chat(tmp_path, {"messages": TALK}, template=None, tokenizer=str(bare)).open("train")
    assert caught.value.hint.startswith("set data.template to")
    with pytest.raises(DataError, match="the tokenizer bytes has no chat template") as caught:
        chat(tmp_path, {"messages": TALK}, template=None, tokenizer="bytes").open("train")
    assert caught.value.hint.startswith("name the model's tokenizer in data.tokenizer, or set data.template")
    assert len(chat(tmp_path, {"text": "Hello"}, template=None, tokenizer=str(bare)).open("train")) == 1


def test_the_bytes_of_calls_of_tools_are_those_that_the_template_writes(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    place = str(tokenizer(tmp_path / "t", template))
    call = {"type": "function", "function": {"name": "weather_in", "arguments": {"x": 7}}}
    asked = {"role": "user", "content": "and?"}
    found = []
    for answer in (
        {"tool_calls": [call], "content": None},
        {"content": "weather_in(7)"},
        {"tool_calls": [call], "content": "So "},
    ):
        data = chat(tmp_path, {"messages": [asked, {"role": "assistant"} | answer]}, template=None, tokenizer=place)
        source = data.open("train")
        targets = source.rows(np.arange(1))["target"]
        found.append(source.bytes_per_token * (targets >= 0).sum())
    assert found == pytest.approx([len("weather_in(7)"), len("weather_in(7)"), len("So weather_in(7)")])


@pytest.mark.parametrize("pack", [True, False])
def test_bytes_per_token_are_those_of_the_text_over_all_targets_of_the_split(tmp_path: Path, pack: bool) -> None:
    place = str(tokenizer(tmp_path / "t", NAMED["chatml"]))
    texts = [f"hello you {'so soon ' * number}?" for number in range(12)]
    talks = [[{"role": "user", "content": "you?"}, {"role": "assistant", "content": text}] for text in texts]
    for records in ([{"text": text} for text in texts], [{"messages": talk} for talk in talks]):
        data = chat(tmp_path, *records, template=None, tokenizer=place, test=0.5, pack=pack, length=256)
        for split in ("train", "test"):
            source = data.open(split)
            batch = source.rows(np.arange(len(source)))
            targets = batch["target"][batch["target"] >= 0].tolist()
            own = data.open_tokenizer()
            ends = [own.token_id(name) for name in ("<|end|>", "<|im_end|>")]
            said = own.decode([token for token in targets if token not in ends])
            assert source.bytes_per_token * len(targets) == pytest.approx(len(said.encode()), abs=len(texts) / 2)


@pytest.mark.slow
def test_the_real_set_fills_its_rows(tmp_path: Path) -> None:
    if not GSM8K.is_file():
        pytest.skip("the GSM8K set is not beside this checkout")
    place = SHARED / "data" / "tokenizers" / "tiny_bpe"
    data = Chat(files=(str(GSM8K),), length=1024, template="chatml", tokenizer=str(place), cache=str(tmp_path))
    train, test = data.open("train"), data.open("test")
    assert train.filled > 0.95 and test.filled > 0.95
    assert train.records + test.records + 16 == 7473
    again = data.open("train")  # from the cache
    assert again.fingerprint == train.fingerprint


def test_a_sentencepiece_model_is_a_tokenizer(tmp_path: Path) -> None:
    model = SHARED / "data" / "tokenizers" / "spm_small" / "m.model"
    if not model.is_file():
        pytest.skip("the SentencePiece model is not beside this checkout")
    opened = open_tokenizer(str(model))
    assert opened.decode(opened.encode(b"Hello world").tolist()) == "Hello world"
    assert (opened.size, opened.special["eos_token"]) == (2000, "</s>")
    data = chat(tmp_path, {"prompt": "Hello there", "response": " it is fine"}, tokenizer=str(model))
    batch = data.open("train").rows(np.arange(1))
    target = batch["target"][0]
    assert opened.decode(target[target >= 0].tolist()).strip() == "it is fine"
    assert target[target >= 0][-1] == opened.token_id("</s>")
    with pytest.raises(DataError, match="has no token"):
        opened.token_id("nothing")
    (tmp_path / "bad.model").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="is not a valid SentencePiece model"):
        open_tokenizer(str(tmp_path / "bad.model")).encode(b"a")


def test_a_text_begins_as_the_tokenizer_begins_it(tmp_path: Path) -> None:
    place = tokenizer(tmp_path / "t", None)
    made = Tokenizer.from_file(str(place / "tokenizer.json"))
    made.add_special_tokens(["<s>"])
    made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    made.save(str(place / "tokenizer.json"))
    opened = open_tokenizer(str(place))
    assert opened.begin == "<s>"
    data = chat(tmp_path, {"text": "Hello"}, template=None, tokenizer=str(place))
    batch = data.open("train").rows(np.arange(1))
    ids = batch["token"][0][batch["document"][0] == 0].tolist()
    assert ids == made.encode("Hello").ids
    assert opened.decode(batch["target"][0][batch["target"][0] >= 0].tolist()) == "Hello<|end|>"
    assert open_tokenizer("bytes").begin == ""


def test_a_missing_test_split_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no record for the test split") as refused:
        chat(tmp_path, {"prompt": "a", "response": "b"}).open("test")
    assert refused.value.hint == "set data.test, or data.test_files"


@pytest.mark.slow
def test_packing_does_not_change_the_loss(tmp_path: Path) -> None:
    records = [{"prompt": "p" * (1 + i % 7), "response": f"{i * 37}"} for i in range(40)]
    model = Decoder(vocab=256, context=40, layers=2, width=16, heads=2, init=0.3)
    params, sums = initial(model.params(), jax.random.key(0), "float32"), []
    for pack in (True, False):
        source = chat(tmp_path, *records, length=40, pack=pack).open("train")
        batch = {name: jnp.asarray(value) for name, value in source.rows(np.arange(len(source))).items()}
        loss = loss_alone(model, params, batch)
        sums.append((float(loss.sum), float(loss.weight)))
    assert sums[0][1] == sums[1][1]
    assert sums[0][0] / sums[0][1] == pytest.approx(sums[1][0] / sums[1][1], rel=1e-6)
