"""The files of a tokenizer, as Hugging Face's libraries read them."""

import json
import shutil
from pathlib import Path

from dtrain.core.files import read_object
from dtrain.core.types import JsonObject
from dtrain.data.paths import expand_path
from dtrain.data.tokenizer import BYTES, TokenizerJson, open_tokenizer
from dtrain.data.tokenizer_folder import GENERATION

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
END = "<|end|>"
"""The name of the byte 0, which ends texts, as a special token."""
TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the files of a tokenizer that `source` has into the folder `target`; their names."""
    names = [name for name in FILES if (source / name).is_file()]
    if names:
        target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    if ids := _ids_of_config(source) if names else {}:  # of a model's folder, whose config.json is not copied
        known = read_object(source / GENERATION) if GENERATION in names else {}
        _json(target / GENERATION, ids | known)
        names += [GENERATION] if GENERATION not in names else []
    return names


def _ids_of_config(folder: Path) -> JsonObject:
    """The ids of special tokens in config.json."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    return {name: config[name] for name in ("bos_token_id", "eos_token_id") if config.get(name) is not None}


def write_tokenizer(tokenizer: str | None, template: str | None, target: Path) -> list[str]:
    """Write the tokenizer of a run's data into a folder for other libraries; the names of the files.

    `template`: the chat template that the run was trained with, if it has one.
    """
    if tokenizer is None:
        return []
    if tokenizer == BYTES:
        return _write_bytes(template, target)
    place = expand_path(tokenizer)
    if not any(path.is_file() for path in (place, place / "tokenizer.json", place / "tokenizer.model")):
        return []  # a published model that came without one
    opened = open_tokenizer(tokenizer)
    if opened.path is None:
        return []
    names = copy_tokenizer(opened.path.parent, target)
    own = "tokenizer.json" if isinstance(opened, TokenizerJson) else "tokenizer.model"
    if own not in names:  # it has another name there
        shutil.copyfile(opened.path, target / own)
        names.append(own)
    special = {
        name: opened.special[name]
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if opened.special.get(name)
    }
    if CONFIG not in names and isinstance(opened, TokenizerJson):
        names.append(_json(target / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    if template is not None and template != opened.template:
        (target / TEMPLATE).write_text(template)
        names += [TEMPLATE] if TEMPLATE not in names else []
    if GENERATION not in names and special:
        ids = {name: opened.token_id(text) for name, text in special.items() if name != "unk_token"}
        names.append(_json(target / GENERATION, {f"{name}_id": number for name, number in ids.items()}))
    return names


def _write_bytes(template: str | None, target: Path) -> list[str]:
    """The byte-level tokenizer: token i is byte i, and token 0, which no text has, the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel writes each byte as a character: a printable one of Latin-1 as itself, the n-th other as U+0100 + n
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte) if byte in printable else chr(256 + others.index(byte)): byte for byte in range(1, 256)}
    made = Tokenizer(models.BPE(vocab={END: 0, **vocab}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    target.mkdir(parents=True, exist_ok=True)
    made.save(str(target / "tokenizer.json"))
    names = ["tokenizer.json", _json(target / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})]
    names.append(_json(target / GENERATION, {"eos_token_id": 0}))
    if template is not None:
        (target / TEMPLATE).write_text(template)
        names.append(TEMPLATE)
    return names


def _json(path: Path, values: JsonObject) -> str:
    path.write_text(json.dumps(values, indent=2) + "\n")
    return path.name
