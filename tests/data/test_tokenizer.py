"""Tokenizer files, whole and damaged."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from dtrain.core.errors import DataError
from dtrain.data.chat import Chat
from dtrain.data.lost_text import lost_text
from dtrain.data.text import Text
from dtrain.data.tokenizer import TokenizerJson, open_tokenizer
from dtrain.data.tokenizer_files import copy_tokenizer


def word_level(path: Path, vocab: dict[str, int], unknown: str = "[UNK]") -> Path:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": unknown}
    path.write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": {"type": "Whitespace"}})
    )
    return path


def test_a_tokenizer_without_its_unknown_token_is_refused(tmp_path: Path) -> None:
    made = TokenizerJson(word_level(tmp_path / "t.json", {"to": 0, "be": 1}))
    assert made.encode(b"to be").tolist() == [0, 1]
    with pytest.raises(DataError, match=r"t\.json cannot encode the text"):
        made.encode(b"to sleep")


def test_numbers_of_tokens_may_have_gaps(tmp_path: Path) -> None:
    tokenizer = TokenizerJson(word_level(tmp_path / "t.json", {"to": 7, "be": 70_000}))
    assert tokenizer.encode(b"to be").tolist() == [
        7,
        70_000,
    ]
    with pytest.raises(DataError, match="has the token id 4,000,000,000"):
        TokenizerJson(word_level(tmp_path / "u.json", {"to": 0, "be": 4_000_000_000})).encode(b"to be")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}']
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.json is not a valid tokenizer\.json"):
        TokenizerJson(tmp_path / "t.json").encode(b"to be")


def test_a_folder_stands_for_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"this folder has no tokenizer\.json") as caught:
        open_tokenizer(str(tmp_path))
    assert "save_pretrained" in caught.value.hint
    word_level(tmp_path / "tokenizer.json", {"to": 0})
    assert open_tokenizer(str(tmp_path)).encode(b"to").tolist() == [0]


def test_a_user_who_does_not_exist_is_refused() -> None:
    with pytest.raises(DataError, match="this machine has no such user"):
        open_tokenizer("~no-such-user/tokenizer.json")


def test_tokens_that_only_the_folder_adds_are_tokens(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({"a": 0, "<": 1, "x": 2, ">": 3}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    plain = open_tokenizer(str(tmp_path)).key
    added = {"4": {"content": "<x>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    opened = open_tokenizer(str(tmp_path))
    assert opened.encode(b"a<x>").tolist() == [0, 4] and opened.key != plain
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9": added["4"]}}))
    with pytest.raises(DataError, match=r"has no token '<x>', to which the files beside it give the id 9"):
        open_tokenizer(str(tmp_path)).encode(b"a")


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(DataError, match="is a pointer of Git LFS") as refused:
        open_tokenizer(str(tmp_path)).encode(b"a")
    assert refused.value.hint == "download it: git lfs pull"


def test_copies_have_the_end_token_that_config_names(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('\ufeff{"eos_token_id": 1}', encoding="utf-8")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert copy_tokenizer(tmp_path, tmp_path / "copy") == [
        "tokenizer.json", "chat_template.json", "generation_config.json",
    ]  # fmt: skip
    copied = open_tokenizer(str(tmp_path / "copy"))
    assert copied.special["eos_token"] == "b" and copied.template == "{{ messages }}"


def test_characters_that_a_tokenizer_does_not_keep_are_named(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "to": 1, "be": 2, "user": 3}
    made = str(word_level(tmp_path / "t.json", vocab))
    text, chat = tmp_path / "a.txt", tmp_path / "a.jsonl"

    def lost(content: str) -> list[str]:
        text.write_text(content)
        chat.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
        of_text = [*lost_text(Text(files=(str(text),), length=8, tokenizer=made), copied=True)]
        of_chat = [*lost_text(Chat(files=(str(chat),), length=8, tokenizer=made), copied=True)]
        assert len(of_text) == len(of_chat)
        return of_text

    assert lost("to be  to be") == []
    assert lost("To be") == [f"the tokenizer {made} does not know 50% of the tokens of the first texts: [UNK]"]
    assert lost("to be \u00e9 be") == [
        f"the tokenizer {made} does not know 25% of the tokens of the first texts: [UNK]"
    ]
    silent = word_level(tmp_path / "s.json", {"t": 0, "o": 1}, unknown="")
    content = json.loads(silent.read_text())
    content["model"] = {"type": "BPE", "vocab": {"t": 0, "o": 1, "to": 2}, "merges": ["t o"]}
    silent.write_text(json.dumps(content))
    text.write_text("to be\nto")
    found = [*lost_text(Text(files=(str(text),), length=8, tokenizer=str(silent)), copied=True)]
    assert found == [f"the tokenizer {silent} loses 38% of the characters of the first texts: 'b', 'e', '\\n'"]
    text.write_text("toto\n" * 20)
    found = [*lost_text(Text(files=(str(text),), length=8, tokenizer=str(silent)), copied=True)]
    assert found == [f"the tokenizer {silent} loses line breaks, 20% of the characters of the first texts"]
    assert content["model"]["merges"]
    joined = json.loads(silent.read_text())
    joined["decoder"] = {"type": "Fuse"}
    (tmp_path / "j.json").write_text(json.dumps(joined))
    text.write_text("to to to to")
    [found] = lost_text(Text(files=(str(text),), length=8, tokenizer=str(tmp_path / "j.json")), copied=True)
    assert found.endswith("loses spaces, 27% of the characters of the first texts")
    text.write_text("toto\n" * 20)
    source = Text(files=(str(text),), length=1, tokenizer=str(silent), test=0.5, cache=str(tmp_path / "c")).open("test")
    assert source.bytes_per_token == 2.5  # of the text, and not of "to to to", which the tokens become
    assert [*lost_text(Text(files=(str(text),), length=8), copied=True)] == []  # bytes
    away = Text(files=("gs://bucket/a.txt",), length=8, tokenizer=made)
    assert [*lost_text(away, copied=False)] == []
