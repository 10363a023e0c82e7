"""Damages data files at random and reads them: files from a faulty disk or from an untrusted archive.

    python benchmarks/fuzz_data.py [--count 400] [--seed 0] [--case NUMBER] [--bombs]

Every file is read like `dtrain check` and `dtrain run` read it, in a process of its own. That must give examples,
DataError, EnvironmentFault or RecipeError within LIMIT seconds of CPU time and MEMORY bytes. The examples must be
finite, and of the types and sizes that their source states. A damaged cache must give the same examples as before.
`--bombs` looks at files that unpack to gigabytes instead, like `dtrain check`: only a DataError is right, within the
time and the memory that a check may take.
Exits with 1 and names the cases that failed; the same seed gives the same cases. `--case` shows one of them, and keeps
its folder.
"""

import argparse
import faulthandler
import json
import lzma
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox  # noqa: F401 (modules that every case needs)
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.json
import pyarrow.parquet
import safetensors.numpy  # noqa: F401
import tokenizers  # noqa: F401
from damaged_files import KINDS, SHARES, Weights, damaged

from dtrain.core.errors import DataError, EnvironmentFault, RecipeError
from dtrain.core.limited import BYTES
from dtrain.data import digest_cache as known
from dtrain.data.chat import Chat
from dtrain.data.npz import Npz
from dtrain.data.source import Data, Split
from dtrain.data.table import Table
from dtrain.recipe.examine import inspect_data

LIMIT, BOMB_LIMIT, MAKE_LIMIT = 2.0, 10.0, 60.0
"""Seconds of CPU time: for damaged files, for bombs, and to make a bomb."""
HANGS = 15
"""So many times the limit may pass on the clock: other programs use the processor, too."""
MEMORY, ROOM, WRITTEN = 2**30, 4 * 2**30, 2**30
"""Bytes: that reading may take; at which it is stopped; that it may write into one file."""
TYPES = {"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"}
"""Of arrays that a model takes."""
PACKAGE = f"{os.sep}dtrain{os.sep}"

MIB = 2**20
LETTERS, SPACES, NUMBERS = b"a" * MIB, b" " * MIB, b"1,2\n" * (MIB // 4)
TAR_END = bytes(1024)


class TooLong(BaseException):
    """The limit of CPU time is reached; no `except Exception` takes it for damage."""


class WrongError(Exception):
    """Something that reading must not do."""

    def __init__(self, what: str, detail: object) -> None:
        super().__init__(f"{what}: {detail}")
        self.what = what


@dataclass
class Result:
    """How a case ended."""

    outcome: str = ""
    """Empty if it failed."""
    kind: str = ""
    """The type of the error."""
    place: str = ""
    """Where in dtrain it was raised, or passed last."""
    message: str = ""
    trace: str = ""
    note: str = ""
    """What was damaged, and how."""
    cpu: float = 0.0
    resident: int = 0
    """Bytes of memory before it was read, and by how many it grew."""
    grown: int = 0


def rows(data: Data | Weights) -> dict[str, bytes]:
    """The examples of the splits, at most 64 of each, after all that a run asks a source for."""
    if isinstance(data, Weights):
        return data.rows()
    found: dict[str, bytes] = {}
    splits: tuple[Split, ...] = ("train", "test") if tested(data) else ("train",)
    for split in splits:
        source = data.open(split)
        example, count = source.example, len(source)
        for name in ("fingerprint", "starts", "names", "notes", "bytes_per_token"):
            getattr(source, name, None)
        if source.changed():
            raise WrongError("a file that did not change is reported", source.changed())
        batch = source.rows(np.unique([*range(min(count, 32)), *range(max(count - 32, 0), count)]))
        refuse_unlike(batch, example, split)
        found |= {f"{split} {name}": value.tobytes() for name, value in batch.items()}
    if isinstance(data, Table):
        refuse_unlike({"unlabelled": data.unlabelled(data.files)}, None, "train")
    return found


def tested(data: Any) -> bool:
    """Whether the data has a test split."""
    return bool(getattr(data, "test", 0.0) or getattr(data, "test_files", ()))


def refuse_unlike(batch: dict[str, Any], example: Any, split: str) -> None:
    """WrongError if examples are not as their source states, or have values that no model can use."""
    if example is not None and batch.keys() != example.keys():
        raise WrongError("other features than stated", f"{split}: {sorted(batch)} and {sorted(example)}")
    for name, values in batch.items():
        if not np.isfinite(values).all():
            raise WrongError("values that are not finite", f"{split} {name}")
        if str(values.dtype) not in TYPES:
            raise WrongError("a type that no model takes", f"{split} {name}: {values.dtype}")
        stated = example[name] if example else None
        if stated and (values.shape[1:] != tuple(stated.shape) or str(values.dtype) != stated.dtype):
            raise WrongError("other than stated", f"{split} {name}: {values.dtype}{values.shape[1:]} and {stated}")
        if stated and stated.values and values.size and not -1 <= values.min() <= values.max() < stated.values:
            raise WrongError(
                "values out of range", f"{split} {name}: {values.min()} to {values.max()} of {stated.values}"
            )


def attempt(draw: random.Random, result: Result) -> None:
    """Read a file, damage it and read it again, in an empty folder."""
    kind = draw.choice([name for name in KINDS for _ in range(SHARES.get(name, 1))])
    case = KINDS[kind](draw)
    data, files = case.data, case.files
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    result.note = f"{kind} {', '.join(files)}: sound"
    before = rows(data)
    caches = [path for path in sorted(Path("cache").rglob("*")) if path.is_file()] if Path("cache").exists() else []
    of_cache = bool(caches) and draw.random() < 0.3
    path = draw.choice(caches) if of_cache else Path(draw.choice(case.targets or list(files)))
    if case.hostile and not of_cache and draw.random() < 0.6:
        path = Path((case.targets or list(files))[0])
        content, result.note = case.hostile()
    else:
        content, result.note = damaged(path.read_bytes(), draw), "damaged"
    path.write_bytes(content)
    result.note = f"{kind} {path}: {result.note}"
    result.resident = _resident()
    try:
        after = rows(data)
    except (DataError, EnvironmentFault, RecipeError) as error:
        if of_cache:
            raise WrongError("a damaged cache is refused", error) from error
        result.outcome, result.message = "refused", f"{type(error).__name__}: {error}"
        if not isinstance(data, Weights):
            inspect_data(data)
        return
    if of_cache and before != after:
        raise WrongError("a damaged cache gives other examples", path)
    if not isinstance(data, Weights):
        problems = inspect_data(data).problems
        if problems and tested(data):
            raise WrongError("check refuses what a run reads", problems[0][1])
    result.outcome = "the same examples" if before == after else "other examples"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def isolated(work: Callable[[Result], None], folder: Path, limit: float, memory: int = MEMORY) -> Result:
    """Run in a process of its own, in a folder; what it does wrong is in the result."""
    report, errors = folder.with_suffix(".json"), folder.with_suffix(".err")
    process = os.fork()
    if process == 0:
        try:
            with errors.open("wb") as file:
                os.dup2(file.fileno(), 2)
                faulthandler.enable(file)
                os.chdir(folder)
                report.write_text(json.dumps(asdict(_child(work, limit, memory))))
        finally:
            os._exit(0)
    watched, hung = os.pidfd_open(process), False
    for way_to_end in (signal.SIGABRT, signal.SIGKILL):  # the first writes where it hangs
        if select.select([watched], [], [], limit * HANGS if way_to_end == signal.SIGABRT else 5.0)[0]:
            break
        hung = True
        os.kill(process, way_to_end)
    os.close(watched)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if report.exists() and report.stat().st_size:
        return Result(**json.loads(report.read_text()))
    said = errors.read_text(errors="replace") if errors.exists() else ""
    where = re.search(rf'File "[^"]*{PACKAGE}([^"]+)", line (\d+)', said)
    name = f"hangs over {limit * HANGS:.0f} s" if hung else signal.Signals(-status).name if status < 0 else str(status)
    return Result(kind=name, place=":".join(where.groups()) if where else "", message=said[:200], trace=said)


def _child(work: Callable[[Result], None], limit: float, memory: int) -> Result:
    result = Result()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, limit)
    result.resident = _resident()
    began = time.process_time()
    try:
        work(result)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in frame.filename]
        result.place = f"{frames[-1].filename.rpartition(PACKAGE)[2]}:{frames[-1].lineno}" if frames else ""
        if isinstance(error, WrongError):
            result.place = error.what
        result.outcome, result.kind, result.message = "", type(error).__name__, str(error)[:2000]
        result.trace = "".join(traceback.format_exception(error))[-6000:]
    signal.setitimer(signal.ITIMER_PROF, 0)
    result.cpu = time.process_time() - began
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result.grown = max(most * 1024 - result.resident, 0)
    if result.grown > memory:
        also = f"; then {result.kind or result.outcome}: {result.message[:200]}"
        result.kind, result.message = "memory", f"took {result.grown / 2**30:.1f} GiB in {result.cpu:.1f} s{also}"
        result.outcome = ""
    return result


def _too_long(*_: object) -> None:
    raise TooLong("over the limit of CPU time")


def _gzipped(path: str, before: bytes, part: bytes, count: int, after: bytes) -> None:
    """Write `before`, `count` times `part`, and `after`, packed in a moment: equal parts are packed once."""
    packer, sums = zlib.compressobj(9, wbits=-15), 0
    first = packer.compress(before) + packer.flush(zlib.Z_FULL_FLUSH)
    repeated = packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH)
    for content in (before, *[part] * count, after):
        sums = zlib.crc32(content, sums)
    size = len(before) + count * len(part) + len(after)
    last = packer.compress(after) + packer.flush()
    with Path(path).open("wb") as file:
        file.write(bytes.fromhex("1f8b08000000000002ff") + first)
        for _ in range(count):
            file.write(repeated)
        file.write(last + sums.to_bytes(4, "little") + (size % 2**32).to_bytes(4, "little"))


def _tar_header(name: str, size: int, pax: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = size, pax or {}
    return info.tobuf(tarfile.PAX_FORMAT)


def _pax(size: int) -> bytes:
    """The header of a pax header of so many bytes."""
    header = bytearray(_tar_header("a.txt", size))
    header[156:157] = b"x"  # extended header
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header[:512]):06o}\0 ".encode()
    return bytes(header)


def _sparse_tar() -> None:
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.txt"}
    header = _tar_header("a.txt", 512, pax | {"GNU.sparse.realsize": str(3 * 2**30)})
    Path("bomb.tar").write_bytes(header + b"0\n".ljust(512, b"\0") + bytes(1024))


def _xz_tar() -> None:
    with lzma.open("bomb.tar", "wb", preset=0) as file:
        file.write(_tar_header("a.txt", 1536 * MIB))
        for _ in range(1536):
            file.write(LETTERS)
        file.write(bytes(1024))


def _text_parquet() -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2048, np.int32)), pa.array([LETTERS.decode()]))
    pa.parquet.write_table(
        pa.table({"text": texts}), "bomb.parquet", store_schema=False, dictionary_pagesize_limit=16 * MIB
    )


def _number_parquet() -> None:
    part = pa.table({"x": np.ones(8 * MIB), "label": np.zeros(8 * MIB, np.int8)})
    with pa.parquet.ParquetWriter("bomb.parquet", part.schema) as writer:
        for _ in range(32):
            writer.write_table(part)


def _arrow() -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    part = pa.table({"text": [LETTERS.decode() * 700]})
    with pa.ipc.new_file("bomb.arrow", part.schema, options=options) as writer:
        for _ in range(3):
            writer.write_table(part)


def _npz() -> None:
    with zipfile.ZipFile("bomb.npz", "w") as archive:
        for name, shape, kind in (("x", (3 * 2**18, 256), "<f8"), ("label", (3 * 2**18,), "<i8")):
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
                for _ in range(math.prod(shape) * 8 // MIB):
                    file.write(bytes(MIB))


def _array_record() -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter("bomb.array_record", "group_size:1,zstd:1")
    writer.write(b'{"text": "' + LETTERS * 700 + b'"}')
    writer.close()


def _record_bomb(name: str) -> Data:
    return Chat(files=(name,), length=64, template="plain", test=0.3, cache="cache")


def _table_bomb(name: str) -> Data:
    return Table(files=(name,), label="label", test=0.3)


def _text_line(name: str) -> Callable[[], None]:
    return lambda: _gzipped(name, b'{"text": "', LETTERS, 1536, b'"}\n')


BOMBS: dict[str, tuple[Callable[[], None], Data]] = {
    "a line of 1.5 GB in .jsonl.gz": (_text_line("bomb.jsonl.gz"), _record_bomb("bomb.jsonl.gz")),
    "1.5 GB of spaces in .json.gz": (
        lambda: _gzipped("bomb.json.gz", b"[", SPACES, 1536, b"]"), _record_bomb("bomb.json.gz")),
    "a sparse member of 3 GB in .tar": (_sparse_tar, _record_bomb("bomb.tar")),
    "a member of 1.5 GB in .tar.gz": (
        lambda: _gzipped("bomb.tar.gz", _tar_header("a.txt", 1536 * MIB), LETTERS, 1536, TAR_END),
        _record_bomb("bomb.tar.gz")),
    "a pax header of 1.5 GB in .tar.gz": (
        lambda: _gzipped("bomb.tar.gz", _pax(1536 * MIB), LETTERS, 1536, TAR_END), _record_bomb("bomb.tar.gz")),
    "a member of 1.5 GB in a tar of xz": (_xz_tar, _record_bomb("bomb.tar")),
    "2,048 texts of 1 MB in .parquet": (_text_parquet, _record_bomb("bomb.parquet")),
    "three texts of 0.7 GB in .arrow": (_arrow, _record_bomb("bomb.arrow")),
    "a record of 0.7 GB in .array_record": (_array_record, _record_bomb("bomb.array_record")),
    "a table of 2 GB in .parquet": (_number_parquet, _table_bomb("bomb.parquet")),
    "a table of 1.5 GB in .csv.gz": (
        lambda: _gzipped("bomb.csv.gz", b"x,label\n", NUMBERS, 1536, b""), _table_bomb("bomb.csv.gz")),
    "a line of 1.5 GB in .csv.gz": (
        lambda: _gzipped("bomb.csv.gz", b"x,label\n", LETTERS, 1536, b""), _table_bomb("bomb.csv.gz")),
    "a table with a line of 1.5 GB in .jsonl.gz": (_text_line("bomb.jsonl.gz"), _table_bomb("bomb.jsonl.gz")),
    "an array of 1.5 GB in .npz": (_npz, Npz(file="bomb.npz", test=0.3)),
}  # fmt: skip


def exploded(data: Data, result: Result) -> None:
    """Look at a bomb as `dtrain check` does; only a DataError is right."""
    problems = [error for _, error in inspect_data(data).problems]
    if not problems:
        raise WrongError("a bomb was read", sorted(path.name for path in Path().glob("bomb*")))
    result.message, result.outcome = f"DataError: {problems[0]}", "refused"


def cases(given: argparse.Namespace) -> dict[str, tuple[Callable[[Result], None] | None, Callable[[Result], None]]]:
    """What makes the files of each case, if that is done apart, and what reads them."""
    if given.bombs:
        return {
            name: (lambda _, make=make: make(), lambda result, data=data: exploded(data, result))
            for name, (make, data) in BOMBS.items()
        }
    numbers = range(given.count) if given.case is None else [given.case]
    return {
        f"case {n}": (None, lambda result, n=n: attempt(random.Random(f"{given.seed}:{n}"), result)) for n in numbers
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=400)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--case", type=int, help="only this one, with all that is known of it")
    options.add_argument("--bombs", action="store_true", help="files that unpack to gigabytes")
    given = options.parse_args()
    warnings.simplefilter("ignore")  # from Pillow, about damaged images
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore
    known.FRESH_NS = 0  # use records of digests even though all files are new
    limit, memory = (BOMB_LIMIT, BYTES + 2**28) if given.bombs else (LIMIT, MEMORY)
    results, failed, first = Counter[str](), Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    slowest = largest = 0.0
    for name, (make, read) in cases(given).items():
        parent = Path(tempfile.mkdtemp(prefix="fuzz-"))
        folder = parent / "files"
        folder.mkdir()
        made = isolated(make, folder, MAKE_LIMIT, ROOM) if make else Result()
        result = isolated(read, folder, limit, memory) if not made.kind else made
        slowest, largest = max(slowest, result.cpu), max(largest, result.grown / 2**20)
        results[result.outcome] += 1
        if not result.outcome:
            where = (result.kind, result.place)
            failed[where] += 1
            if where not in first:
                first[where] = f"{name}, {result.note[:150]}: {result.message[:150]!a}"
                print(f"{name}: {result.note}\n{result.trace}", file=sys.stderr)
        if given.bombs or given.case is not None:
            print(f"{name}: {result.outcome or 'FAILED'}; {result.note}; {result.kind} {result.message[:200]!a}; "
                  f"{result.cpu:.1f} s, {result.grown / 2**20:,.0f} MiB")  # fmt: skip
        if given.case is not None:
            print(folder)
        else:
            shutil.rmtree(parent)
    for where, count in failed.most_common():
        print(f"{count} x {where[0]} at {where[1] or 'no place in dtrain'}; the first: {first[where]}")
    shown = ", ".join(
        f"{count} gave {name}" if name != "refused" else f"{count} refused" for name, count in results.items() if name
    )
    count, measured = results.total(), f"slowest {slowest:.2f} s, most memory {largest:,.0f} MiB"
    print(f"{count} damaged files, seed {given.seed}: {shown}; {failed.total()} failed; {measured}")
    sys.exit(failed.total() > 0)


if __name__ == "__main__":
    main()
