"""Small data files of every format, each with what reads it; and hostile versions: values, headers and types that a
well-meant file has rarely, in files that are themselves whole."""

import bz2
import copy
import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from dtrain.checkpoint.tensors import opened, write
from dtrain.data.chat import Chat
from dtrain.data.idx import FILES, IDX
from dtrain.data.images import Images
from dtrain.data.npz import Npz
from dtrain.data.preference import Preference
from dtrain.data.source import Data
from dtrain.data.table import Table
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens
from dtrain.models.agreement import agree, record
from dtrain.models.decoder import Decoder
from dtrain.models.mlp import MLP
from dtrain.weights.read import located, unpadded

TEXT = b"to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer\n" * 40
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"
)
TEMPLATES = {"tools.jinja": TOOLS.encode(), "marked.jinja": MARKED.encode()}
LINES, COLUMNS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz"), (".parquet", ".arrow", ".feather")
TARS = (".tar", ".tar.gz", ".xz.tar", ".bz2.tar")
"""The name of a tar says nothing about how it is packed."""
ARRAY = ".array_record"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Weights:
    """Parameters in files, read like those that a run is given."""

    source: str
    model: Decoder | MLP

    def rows(self) -> dict[str, bytes]:
        """The parameters by name."""
        ours, source = unpadded(self.model.params()), Path(self.source)
        with opened(source) as tensors:
            agree(self.model, tensors.metadata, source, lambda _: None, published=False)
            where = located(tensors, self.model, ours, source)

            def load(tensor: str, index: tuple[slice, ...]) -> np.ndarray:
                return tensors.part(f"{where.prefix}{tensor}", index)

            whole = {name: [slice(0, size) for size in param.shape] for name, param in ours.items()}
            return {name: where.table[name].read(load, ours[name], whole[name]).tobytes() for name in ours}


@dataclass(frozen=True)
class Case:
    """Files, what reads them, and which of them may be damaged."""

    data: Data | Weights
    files: Files
    targets: Sequence[str] = ()
    """All files, if none is named."""
    hostile: Callable[[], tuple[bytes, str]] | None = None
    """Another content of the first target, and what is hostile about it."""


def images(draw: random.Random) -> Case:
    formats = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "gif": "GIF", "webp": "WEBP", "ppm": "PPM"}
    suffix = draw.choice(list(formats))
    files = {f"set/a/x.{suffix}": _picture(formats[suffix], draw)}
    return Case(Images(root="set", size=(8, 8), test=0.0, cache="cache"), files)


def archive(draw: random.Random) -> Case:
    method = draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    content = _zipped([(name, _picture("PNG", draw)) for name in ("a/x.png", "b/y.png")], method)
    return Case(Images(root="set.zip", size=(8, 8), test=0.0, cache="cache"), {"set.zip": content})


def _zipped(members: Sequence[tuple[str, bytes]], method: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name), content, method)
    return made.getvalue()


def _picture(kind: str, draw: random.Random) -> bytes:
    made = io.BytesIO()
    pixels = np.frombuffer(draw.randbytes(24 * 20 * 3), np.uint8).reshape(24, 20, 3)
    Image.fromarray(pixels).save(made, kind)
    return made.getvalue()


def idx(draw: random.Random) -> Case:
    packed, files = draw.random() < 0.5, {}
    for name, shape in zip(FILES["train"], ((12, 5, 4), (12,)), strict=True):
        head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        content = head + bytes(draw.randrange(10) for _ in range(int(np.prod(shape))))
        files[f"mnist/{name}{'.gz' * packed}"] = gzip.compress(content, mtime=0) if packed else content
    return Case(IDX(root="mnist", download=False), files)


def tokens(draw: random.Random) -> Case:
    dtype = draw.choice(["uint16", "int64", ">u4"])
    head = np.array([20240520, 1, 2000, *[0] * 253], np.int32).tobytes()
    raw = np.arange(2000).astype(np.uint16).tobytes()
    numpy = _numpy(np.arange(2000).astype(dtype))
    name, content = draw.choice([("t.npy", numpy), ("t.bin", head + raw), ("t.bin", raw)])
    return Case(Tokens(files=(name,), length=16, separator=draw.choice([None, 0]), cache="cache"), {name: content})


def _numpy(array: np.ndarray, pickled: bool = False) -> bytes:
    made = io.BytesIO()
    np.save(made, array, allow_pickle=pickled)
    return made.getvalue()


def tokenizer(draw: random.Random) -> Case:
    files = {"a.txt": TEXT, "t.json": _tokenizer(draw)}
    return Case(Text(files=("a.txt",), length=8, tokenizer="t.json", cache="cache"), files, ["t.json"])


def _tokenizer(draw: random.Random) -> bytes:
    words = {word: number for number, word in enumerate(["[UNK]", *sorted(set(TEXT.decode().split()))])}
    letters = {chr(byte): number for number, byte in enumerate(sorted(set(TEXT)))}
    pieces = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    model = draw.choice(
        [
            {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
            {"type": "BPE", "vocab": letters | {"to": 60}, "merges": ["t o"], "unk_token": None},
            {"type": "Unigram", "vocab": [[letter, -1.0] for letter in letters], "unk_id": 0},
            {"type": "WordPiece", "vocab": words} | pieces,
        ]
    )
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    return json.dumps(whole).encode()


def text(draw: random.Random) -> Case:
    return Case(Text(files=("a.txt",), length=8, pack=draw.random() < 0.5, cache="cache"), {"a.txt": TEXT})


def chat(draw: random.Random) -> Case:
    form = draw.choice(list(FORMS))
    rows = [FORMS[form](f"question {i}, ü", f"answer {i} 🙂") for i in range(draw.randint(4, 9))]
    return _templated(Chat, rows, draw, pack=draw.random() < 0.7, too_long=draw.choice(["skip", "cut"]))


def _messages(asked: str, answer: str) -> dict[str, Any]:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": asked}]
    return {"id": 7, "messages": [*turns, {"role": "assistant", "content": answer}]}


def _calls(asked: str, answer: str) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": asked, "days": 2}}}
    found = _messages(asked, answer)
    turns = [{"role": "assistant", "content": None, "tool_calls": [called]}, {"role": "tool", "content": "4 C"}]
    found["messages"][2:2] = turns
    return found | {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}


FORMS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "messages": _messages,
    "tools": _calls,
    "conversations": lambda asked, answer: {
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    },
    "prompt": lambda asked, answer: {"prompt": asked, "response": answer, "system": "be brief"},
    "instruction": lambda asked, answer: {"instruction": asked, "input": "", "output": answer, "score": 0.5},
    "text": lambda asked, answer: {"text": f"{asked} {answer}", "meta": {"source": ["a", "b"], "at": 3}},
}


def preference(draw: random.Random) -> Case:
    listed, rows = draw.random() < 0.5, []
    for i in range(draw.randint(4, 9)):
        row: dict[str, Any] = {"prompt": f"question {i}", "chosen": f"yes {i}", "rejected": "no", "margin": 0.5}
        if listed:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            row |= {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
        rows.append(row)
    return _templated(Preference, rows, draw)


def _templated(kind: Any, rows: list[dict[str, Any]], draw: random.Random, **settings: Any) -> Case:
    """Records in a file of one of the formats; sometimes a second file is for testing."""
    suffix = draw.choice([*LINES, *COLUMNS, *TARS, *([ARRAY] if find_spec("array_record") else [])])
    name, files = f"r{suffix}", {}
    settings["tokenizer"] = draw.choice(["bytes", "bytes", "t.json"])
    settings["template"] = draw.choice(["chatml", "llama3", "alpaca", "plain", *TEMPLATES, *TEMPLATES])
    if settings["tokenizer"] != "bytes":
        files["t.json"] = _tokenizer(draw)
    if settings["template"] in TEMPLATES:
        files[settings["template"]] = TEMPLATES[settings["template"]]
    if draw.random() < 0.2:
        files[f"test{suffix}"], settings["test_files"] = _records(suffix, rows, draw), (f"test{suffix}",)
    files[name] = _records(suffix, rows, draw)
    data = kind(files=(name,), length=512, test=0.3, cache=draw.choice(["cache", "cache", ""]), **settings)
    targets = draw.sample([name, *settings.get("test_files", ())], 1)
    return Case(data, files, targets, lambda: _hostile_records(suffix, rows, draw))


def _records(suffix: str, rows: Sequence[dict[str, Any]], draw: random.Random) -> bytes:
    if suffix in COLUMNS:
        return _arrow(suffix, pa.Table.from_pylist(list(rows)), draw, stream=True)
    return _packed(suffix, _plain(suffix, [json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows], draw))


def _hostile_records(suffix: str, rows: Sequence[dict[str, Any]], draw: random.Random) -> tuple[bytes, str]:
    if suffix in COLUMNS:
        return _hostile_arrow(suffix, rows, draw, stream=True)
    texts, at, member, note = [json.dumps(row) for row in rows], draw.randrange(len(rows)), None, "damaged inside"
    if suffix in TARS and draw.random() < 0.5:
        member, note = hostile_member(draw)
    elif draw.random() < 0.8:
        texts[at], note = hostile_json(rows[at], draw)
    else:  # what is then packed
        return _packed(suffix, damaged(_plain(suffix, texts, draw), draw)), note
    return _packed(suffix, _plain(suffix, texts, draw, member)), note


def _plain(suffix: str, texts: Sequence[str], draw: random.Random, member: Any = None) -> bytes:
    """Texts of JSON as a file that is not packed. `member`: one more in a tar, and its content."""
    contents = [one.encode(errors="surrogatepass") for one in texts]
    if suffix in TARS:
        made, kind = io.BytesIO(), draw.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
        picture = draw.randbytes(draw.choice([2, 2000, 60_000]))  # the last is not unpacked when a tar is opened
        members = [(tarfile.TarInfo(f"set/{i:03}.json"), content) for i, content in enumerate(contents)]
        members.insert(draw.randint(0, len(members)), member or (tarfile.TarInfo("set/900.jpg"), picture))
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT if member else kind) as tar:
            for info, content in members:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return made.getvalue()
    if suffix == ARRAY:
        from array_record.python.array_record_module import ArrayRecordWriter

        how = draw.choice(["group_size:1", "group_size:2,uncompressed", "group_size:2,zstd:1", "group_size:3,snappy"])
        writer = ArrayRecordWriter("made", how)
        for content in contents:
            writer.write(content)
        writer.close()
        whole = Path("made").read_bytes()
        Path("made").unlink()
        return whole
    return b"[" + b", ".join(contents) + b"]" if suffix in (".json", ".json.gz") else b"\n".join([*contents, b""])


def _packed(suffix: str, content: bytes) -> bytes:
    if suffix.endswith(".gz"):
        return gzip.compress(content, mtime=0)
    return {".xz.tar": lzma.compress, ".bz2.tar": bz2.compress}.get(suffix, bytes)(content)


def _arrow(suffix: str, table: pa.Table, draw: random.Random, stream: bool) -> bytes:
    """A table as a file. `stream`: an .arrow file may have the format of streams."""
    import pyarrow.ipc
    import pyarrow.parquet

    made = io.BytesIO()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(
            table,
            made,
            compression=draw.choice(["none", "none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
            row_group_size=draw.choice([None, 3]),
            data_page_version=draw.choice(["1.0", "2.0"]),
            use_dictionary=draw.random() < 0.5,
            store_schema=draw.random() < 0.7,
            write_page_checksum=draw.random() < 0.2,
        )
        return made.getvalue()
    stream = stream and suffix == ".arrow" and draw.random() < 0.6
    options = pyarrow.ipc.IpcWriteOptions(compression=draw.choice([None, None, "lz4", "zstd"]))
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(made, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=draw.choice([None, 3]))
    return made.getvalue()


def _hostile_arrow(suffix: str, rows: Sequence[Any], draw: random.Random, stream: bool) -> tuple[bytes, str]:
    while True:
        other, note = hostile_table(pa.Table.from_pylist(list(rows)), draw)
        try:
            return _arrow(suffix, other, draw, stream), note
        except (pa.ArrowException, ValueError):  # not every format has every type
            continue


def table(draw: random.Random) -> Case:
    predict = draw.choice(["class", "number"])
    rows = [
        {
            "width": draw.gauss(3, 1),
            "height": draw.randrange(100),
            "long": draw.random() < 0.5 if predict == "class" else draw.random(),
            "kind": draw.choice(["a", "b", "c"]) if predict == "class" else draw.gauss(0, 9),
        }
        for _ in range(40)
    ]
    suffix = draw.choice([".csv", ".tsv", ".csv.gz", ".jsonl", ".jsonl.gz", *COLUMNS, ".csv", ".parquet"])
    name, files = f"t{suffix}", {}
    files[name] = _table(suffix, rows, draw)
    settings: dict[str, Any] = {"scale": draw.random() < 0.5, "test": 0.3}
    if draw.random() < 0.3:
        files[f"test{suffix}"], settings["test_files"] = _table(suffix, rows[:9], draw), (f"test{suffix}",)
    if draw.random() < 0.3:
        settings["columns"] = ("height", "width")
    data = Table(files=(name,), label="kind", predict=predict, **settings)
    targets = draw.sample(sorted(files), len(files))
    return Case(data, files, targets, lambda: _hostile_rows(suffix, rows, draw))


def _table(suffix: str, rows: Sequence[dict[str, Any]], draw: random.Random) -> bytes:
    if suffix in COLUMNS:
        return _arrow(suffix, pa.Table.from_pylist(list(rows)), draw, stream=False)
    if suffix.startswith(".jsonl"):
        return _packed(suffix, _plain(suffix, [json.dumps(row) for row in rows], draw))
    return _cells(suffix, [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)])


def _cell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cells(suffix: str, lines: Sequence[Sequence[str]]) -> bytes:
    between = "\t" if suffix == ".tsv" else ","
    content = "".join(between.join(line) + "\n" for line in lines).encode(errors="surrogatepass")
    return gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def _hostile_rows(suffix: str, rows: Sequence[dict[str, Any]], draw: random.Random) -> tuple[bytes, str]:
    if suffix in COLUMNS:
        return _hostile_arrow(suffix, rows, draw, stream=False)
    if suffix.startswith(".jsonl"):
        return _hostile_records(suffix, rows, draw)
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    note = hostile_cell(lines, draw)
    return _cells(suffix, lines), note


def npz(draw: random.Random) -> Case:
    size = 24
    arrays = {
        draw.choice(["features", "x"]): np.frombuffer(draw.randbytes(size * 5), np.uint8).reshape(size, 5) / 51,
        "label": np.arange(size) % 3,
    }
    if draw.random() < 0.3:
        arrays = {
            "token": np.arange(size * 8).reshape(size, 8) % 50,
            "target": np.arange(size * 8).reshape(size, 8) % 50,
        }
    arrays = {name: array.astype(array.dtype.kind + draw.choice(["4", "8"])) for name, array in arrays.items()}
    method = draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])

    def packed(changed: Sequence[tuple[str, np.ndarray]]) -> bytes:
        return _zipped([(f"{name}.npy", _numpy(array, pickled=True)) for name, array in changed], method)

    def hostile() -> tuple[bytes, str]:
        name = draw.choice(list(arrays))
        other, note = _hostile_array(arrays[name], draw)
        changed = [*(arrays | {name: other}).items()]
        if draw.random() < 0.2:
            extra = draw.choice(["label", "row", "weight", "../../label", "", "a\x1b]0;x\x07", "label.npy"])
            changed, note = [*changed, (extra, other)], f"{note}, and one named {extra!r}"
        return packed(changed), f"{name}: {note}"

    data = Npz(file="a.npz", test=0.3, classes=draw.choice([None, None, 5]))
    return Case(data, {"a.npz": packed(list(arrays.items()))}, hostile=hostile)


def _hostile_array(array: np.ndarray, draw: random.Random) -> tuple[np.ndarray, str]:
    values = [float("nan"), float("inf"), 1e300, 3.5e38, -1e39, 2.0**31, -1.0, 1e18, 0.5]
    types = [">f4", ">i4", ">f8", "f2", "g", "c8", "?", "u8", "u1", "S4", "U3", "M8[ns]", "m8[s]", "V4", "O", "i1,f4"]
    match draw.randrange(4):
        case 0 | 1:
            value, other = draw.choice(values), array.astype(draw.choice(["f4", "f8", "f8", str(array.dtype)]))
            with np.errstate(all="ignore"):
                other.reshape(-1)[draw.randrange(other.size)] = np.array(value).astype(other.dtype)
            return other, f"{value} as {other.dtype}"
        case 2:
            kind = draw.choice(types)
            return np.zeros(array.shape, kind) if kind in ("V4", "i1,f4") else array.astype(kind), f"dtype {kind}"
        case _:
            shape = draw.choice([(), (0,), (len(array),), (len(array), 0), (len(array) + 1, 2), (1,) * 40, (0, 5)])
            return np.zeros(shape, array.dtype), f"shape {shape}"


def weights(draw: random.Random) -> Case:
    model = draw.choice([MLP(sizes=(4, 8, 3)), Decoder(vocab=16, context=8, layers=2, width=8, heads=2)])
    kind = draw.choice(["f4", "f2", "f8"])
    tensors = {name: np.ones(param.shape, kind) for name, param in unpadded(model.params()).items()}
    names, made = sorted(tensors), {}
    parts = [names] if draw.random() < 0.6 else [names[::2], names[1::2]]
    for number, own in enumerate(parts):
        path = Path(f"made{number}.safetensors")
        write(path, {name: tensors[name] for name in own}, record(model) if number == 0 else {})
        made[f"w/{number}.safetensors"] = path.read_bytes()
        path.unlink()
    first = made["w/0.safetensors"]

    def hostile() -> tuple[bytes, str]:
        size = int.from_bytes(first[:8], "little")
        head, note = hostile_json(json.loads(first[8 : 8 + size]), draw)
        content = head.encode(errors="surrogatepass")
        return len(content).to_bytes(8, "little") + content + first[8 + size :], note

    return Case(Weights("w", model), made, ["w/0.safetensors", *made], hostile)


DEPTHS = (90, 400, 900, 1_100, 20_000, 200_000)
"""How deep values are nested: below and above what libraries accept."""
VALUES = (
    '"a\\ud83d"', '"\\udc00\\ud83d"', '"\\u0000"', '"\\ue0f0 x \\ue0f1"', '"<|im_end|>\\n"', '"\\u001b]0;x\\u0007"',
    "null", "true", "[]", "{}", '""', "0", "-1", "0.5", "NaN", "-Infinity", "1e400", "1e39", "-1e308", "1e308",
    "9007199254740993", "18446744073709551616", "9" * 5000, "[null]", '{"a": null}', '[[{"role": 1}]]', '"assistant"',
    '"2020-01-01"', "2020-01-01", "nul", "'a'", "01", '"\\x41"', '"\\ud83', '"open', "[1,", '"' + "x" * 100_000 + '"',
)  # fmt: skip
"""Texts in place of a value; some are not JSON."""
NAMES = ("messages", "role", "content", "tool_calls", "text", "prompt", "value", "from", "chosen", "kind", "dtype",
         "shape", "data_offsets", "__metadata__", "", "\x00", "a.b")  # fmt: skip
CELLS = (
    "", "nan", "NaN", "inf", "-inf", "1e39", "-1e39", "1e308", "-1e308", "1e400", "9007199254740993", "1e-400", "0x10",
    "18446744073709551616", "9" * 400, "text", "null", "NA", "true", "2020-01-01", "00:10:00", '"', '"a\nb"', "1,2",
    "1\t2", "\x00", "\ud83d", "ü" * 5000, " 1", "1_000", "1 000", "--1",
)  # fmt: skip
"""In place of a cell of a CSV."""


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One to three of: a flipped bit; bytes removed, zeroed, duplicated, randomised, set to 255, inserted or swapped;
    truncation."""
    found = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        near = draw.choice([32, 256, 4096, 10**9])
        at = draw.randrange(min(len(found), near) or 1)
        if draw.random() < 0.15:  # formats with their index at the end
            at = max(len(found) - 1 - at, 0)
        size = draw.choice([1, 2, 4, 8, 64, 1000])
        match draw.randrange(9):
            case 0:
                found[at : at + 1] = bytes(byte ^ (1 << draw.randrange(8)) for byte in found[at : at + 1])
            case 1:
                del found[at : at + size]
            case 2:
                found[at : at + size] = bytes(len(found[at : at + size]))
            case 3:
                found[at:at] = found[at : at + size]
            case 4:
                found[at : at + size] = draw.randbytes(len(found[at : at + size]))
            case 5:
                found[at : at + size] = b"\xff" * len(found[at : at + size])
            case 6:
                found[at:at] = draw.randbytes(size)
            case 7:
                other = draw.randrange(len(found) or 1)
                first, second = found[at : at + size], found[other : other + size]
                found[at : at + len(second)], found[other : other + len(first)] = second, first
            case _:
                del found[at:]
    return bytes(found)


def _value(draw: random.Random) -> str:
    if draw.random() < 0.15:
        depth, (before, after) = draw.choice(DEPTHS), draw.choice([("[", "]"), ('{"a":', "}"), ('[{"role":', "}]")])
        return before * depth + "1" + after * depth * (draw.random() < 0.8)
    return draw.choice(VALUES)


def hostile_json(value: Any, draw: random.Random) -> tuple[str, str]:
    """The JSON text of a value with one or two changes: values, names, types, doubled or missing keys."""
    whole, notes, texts = [copy.deepcopy(value)], [], {}
    for number in range(draw.choice([1, 1, 2])):
        inside, key = draw.choice(list(_places(whole)))
        mark, text = f"\x01{number}\x01", _value(draw)
        match draw.choice(["value"] * 6 + ["delete", "rename", "double", "insert"]):
            case "delete" if inside is not whole:
                del inside[key]
                notes.append(f"without {key!r}")
            case "rename" if isinstance(inside, dict):
                inside[name := draw.choice(NAMES)] = inside.pop(key)
                notes.append(f"{key!r} is named {name!r}")
            case "double" if isinstance(inside, dict):
                inside[mark], texts[json.dumps(mark)] = f"{mark}v", json.dumps(key)
                texts[json.dumps(f"{mark}v")] = text
                notes.append(f"a second {key!r}: {text[:30]}")
            case "insert" if isinstance(inside, list) and inside is not whole:
                inside.insert(key, mark)
                texts[json.dumps(mark)] = text
                notes.append(f"{text[:30]} inserted")
            case _:
                inside[key], texts[json.dumps(mark)] = mark, text
                notes.append(f"{key!r} is {text[:30]}")
    found = json.dumps(whole[0], ensure_ascii=draw.random() < 0.5)
    for mark, text in texts.items():
        found = found.replace(mark, text)
    return found, "; ".join(notes)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


def hostile_cell(lines: list[list[str]], draw: random.Random) -> str:
    """Change the cells of a table; says how."""
    row, column, cell = draw.randrange(1, len(lines)), draw.randrange(len(lines[0])), draw.choice(CELLS)
    name, note = lines[0][column], f"{lines[0][column]} of row {row} is {cell[:30]!r}"
    match draw.choice(["cell"] * 6 + ["column", "name", "double", "short", "no rows", "no lines"]):
        case "column":
            note = f"all of {name} are {cell[:30]!r}"
            for line in lines[1:]:
                line[column] = cell
        case "name":
            lines[0][column], note = cell, f"column {name} is named {cell[:30]!r}"
        case "double":
            note = f"two columns are named {name}"
            for line in lines:
                line.append(line[0])
            lines[0][-1] = name
        case "short":
            del lines[row][column:]
            note = f"row {row} is short"
        case "no rows":
            del lines[1:]
            note = "no rows"
        case "no lines":
            lines.clear()
            note = "no lines"
        case _:
            lines[row][column] = cell
    return note


def hostile_member(draw: random.Random) -> tuple[tuple[tarfile.TarInfo, bytes], str]:
    """A member of a tar whose header lies, and its content."""
    info, content = tarfile.TarInfo(draw.choice(["set/500.json", "set/001.txt", "set/001.json"])), b'{"text": "a"}'
    match draw.randrange(6):
        case 0 | 1:
            key = draw.choice(["size", "mtime", "path", "uid", "linkpath", "hdrcharset", "comment", "GNU.sparse.map",
                               "GNU.sparse.size", "GNU.sparse.realsize"])  # fmt: skip
            value = draw.choice(
                ["abc", "-1", "0", "99999999999999", "9" * 400, "nan", "\x00", "../../x", "1,2,3", "0,1"]
            )
            info.pax_headers = {key: value}
        case 2:
            info.type = draw.choice([tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE,
                                     tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE, b"Z"])  # fmt: skip
            info.linkname = draw.choice(["set/000.json", "set/500.json", "/etc/passwd", ""])
        case 3:
            info.name = draw.choice(["../../etc/x.json", "/x.json", "\x1b]0;x\x07.json", "x" * 5000 + ".json", ".json",
                                     "a//b/.txt", "\udc80.json"])  # fmt: skip
        case 4:
            real = str(draw.choice([600, 10**6]))
            info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": real,
                                "GNU.sparse.name": info.name}  # fmt: skip
            content = draw.choice([b"1\n0\n5\n", b"1\n-5\n5\n", b"x\n", b"999999999\n", b"1\n9999999\n5\n"])
            content = content.ljust(512, b"\0") + b"hello"
        case _:
            content = draw.choice(
                [b"\xff\xfe", b"\xed\xa0\xbd", b"\x80" * 9, b"", b"[1]", b"null", b"{", b"\xef\xbb\xbf{}"]
            )
    note = f"member {info.name[:30]!r} of type {info.type!r} with {info.pax_headers} and {content[:20]!r}"
    return (info, content), note


def _text(size: int, content: bytes) -> pa.Array:
    """A column of texts that need not be UTF-8."""
    offsets = np.arange(size + 1, dtype=np.int32) * len(content)
    return pa.Array.from_buffers(pa.string(), size, [None, pa.py_buffer(offsets), pa.py_buffer(content * size)])


def _whole(size: int, kind: pa.DataType, value: int) -> pa.Array:
    return pa.array([value] * size, pa.int64()).view(kind)


TYPES: dict[str, Callable[[int], pa.Array]] = {
    "ns": lambda n: _whole(n, pa.timestamp("ns"), 1_700_000_000_000_000_001),
    "far timestamp": lambda n: _whole(n, pa.timestamp("s"), 2**60),
    "far past": lambda n: _whole(n, pa.timestamp("us"), -(2**62)),
    "unknown zone": lambda n: _whole(n, pa.timestamp("us", "Mars/Base"), 1),
    "date64": lambda n: _whole(n, pa.date64(), 2**55 // 86_400_000 * 86_400_000),
    "date32": lambda n: pa.array([2**31 - 1] * n, pa.int32()).view(pa.date32()),
    "time64": lambda n: _whole(n, pa.time64("ns"), 2**62),
    "duration": lambda n: _whole(n, pa.duration("s"), 2**60),
    "duration ns": lambda n: _whole(n, pa.duration("ns"), 1),
    "interval": lambda n: pa.array([pa.MonthDayNano([1, 2, 3])] * n),
    "decimal": lambda n: pa.array(["1e30"] * n).cast(pa.decimal128(38, 2)),
    "binary": lambda n: pa.array([b"\xff\x00"] * n),
    "bytes of fixed size": lambda n: pa.array([b"abcd"] * n, pa.binary(4)),
    "no UTF-8": lambda n: _text(n, b"a\xff\xfe"),
    "half an emoji": lambda n: _text(n, b"a\xed\xa0\xbd"),
    "private marks": lambda n: pa.array(["\ue0f0 x \ue0f1"] * n),
    "large text": lambda n: pa.array(["text"] * n, pa.large_string()),
    "view of text": lambda n: pa.array(["a text that is not in the view itself"] * n, pa.string_view()),
    "dictionary": lambda n: pa.array(["text"] * n).dictionary_encode(),
    "dictionary of numbers": lambda n: pa.array([1.5] * n).dictionary_encode(),
    "runs": lambda n: pa.RunEndEncodedArray.from_arrays(pa.array([n], pa.int32()), pa.array([1.0])),
    "nothing": pa.nulls,
    "struct": lambda n: pa.array([{"a": 1, "b": None}] * n),
    "list": lambda n: pa.array([[1, None]] * n),
    "messages": lambda n: pa.array([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * n),
    "role alone": lambda n: pa.array([[{"role": "user"}]] * n),
    "nested": lambda n: pa.array([[[[[["a"]]]]]] * n),
    "map": lambda n: pa.array([[("a", 1), ("a", 2)]] * n, pa.map_(pa.string(), pa.int64())),
    "uint64": lambda n: pa.array([2**64 - 1] * n, pa.uint64()),
    "over 2**53": lambda n: pa.array([2**53 + 1] * n),
    "float16": lambda n: pa.array(np.full(n, 6e4, np.float16)),
    "NaN": lambda n: pa.array([float("nan")] * n),
    "infinity at the end": lambda n: pa.array([1.0] * (n - 1) + [float("inf")]),
    "null at the end": lambda n: pa.array([1.0] * (n - 1) + [None]),
    "over float32": lambda n: pa.array([1e39] + [1.0] * (n - 1)),
    "far apart": lambda n: pa.array([1e308, -1e308] * (n // 2) + [0.0] * (n % 2)),
    "tiny": lambda n: pa.array([1e-300 * i for i in range(n)]),
    "text and null": lambda n: pa.array([None] + ["a"] * (n - 1)),
    "lists as labels": lambda n: pa.array([[1, 2]] * n, pa.list_(pa.int64(), 2)),
    "truth": lambda n: pa.array([True, None] * (n // 2) + [False] * (n % 2)),
}
"""Columns of so many values."""


def hostile_table(table: pa.Table, draw: random.Random) -> tuple[pa.Table, str]:
    """An Arrow table with a column of another type, missing or doubled columns, nulls, or strange metadata."""
    at, kind = draw.randrange(table.num_columns), draw.choice(list(TYPES))
    name, other = table.column_names[at], TYPES[kind](table.num_rows)
    match draw.choice(["replace"] * 5 + ["add", "add", "double", "drop", "null", "no rows", "metadata", "rename"]):
        case "add":
            changed, note = table.append_column("more", other), f"a column more: {kind}"
        case "double":
            doubled = draw.choice([other, table.column(at)])
            changed, note = table.append_column(name, doubled), f"two columns are named {name}"
        case "drop":
            changed, note = table.remove_column(at), f"no column {name}"
        case "null":
            rows = table.to_pylist()
            rows[draw.randrange(len(rows))][name] = None
            changed, note = pa.Table.from_pylist(rows, table.schema), f"a null in {name}"
        case "no rows":
            changed, note = table.slice(0, 0), "no rows"
        case "metadata":
            found: Any = {
                key: draw.choice([b"\xff", b"{", b""]) for key in (b"ARROW:schema", b"pandas", b"huggingface")
            }
            changed, note = table.replace_schema_metadata(found), f"metadata {found}"
        case "rename":
            new = draw.choice(NAMES)
            names = [new if i == at else old for i, old in enumerate(table.column_names)]
            changed, note = table.rename_columns(names), f"{name} is named {new!r}"
        case _:
            changed, note = table.set_column(at, name, other), f"{name}: {kind}"
    return changed, note


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "images": images, "archive": archive, "idx": idx, "tokens": tokens, "tokenizer": tokenizer, "text": text,
    "chat": chat, "preference": preference, "table": table, "npz": npz, "weights": weights,
}  # fmt: skip
SHARES = {"chat": 10, "preference": 4, "table": 6, "npz": 3, "weights": 2}
"""How often a kind is drawn, if not once."""
