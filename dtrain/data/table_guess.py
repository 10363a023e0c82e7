"""What a table of a user holds: which of its columns a model can get, and which may be predicted."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.files import resolve_files
from dtrain.data.guess import FEW, Guess, has_conversations, split_files
from dtrain.data.table_columns import marks_of_missing, odd_texts, written_as_texts
from dtrain.data.table_files import SUFFIXES, read_tables

USUAL = re.compile(
    r"(?i:label|labels|class|classes|target|y|category|species|outcome|diagnosis|variety|grade|survived|churn|price)"
)
"""Names of columns that are predicted."""
ROW_NAMES = re.compile(r"(?i:__index_level_\d+__|unnamed: 0|(\w*[_ ])?(id|idx|index|uuid)|)|\w*[a-z]I[dD]")
"""Names of columns that identify rows: those that pandas writes, and usual ones."""
CLASSES = re.compile(r"(?i:label|labels|class|classes|category|species|variety)")
"""Names of columns whose whole numbers are classes, even if they are many."""
FEW_CLASSES, MANY = 20, 1_000
"""Most different whole numbers that are classes, and most in a column of such a name."""
WRITTEN = "numbers or dates written as texts"
CATEGORIES = 64
"""Most different texts of a column that become columns, or classes."""
SHOWN = 10


@dataclass(frozen=True)
class Seen:
    """A column of a table."""

    name: str
    form: str
    """text, number, whole, date, or the type of Arrow for others."""
    different: int
    missing: int
    is_whole: bool = False
    """Whether all of its values are whole numbers."""
    odd: str = ""
    """Where it has texts among numbers or dates."""

    @property
    def unfit(self) -> str:
        """Why a model cannot get it; empty if it can."""
        if self.form == "text" and self.different > CATEGORIES:
            return f"{self.different:,} different texts"
        if self.form == WRITTEN:
            return self.form + (f" ({self.odd})" if self.odd else "")
        return "" if self.form in ("text", "number", "whole", "date") else f"values of type {self.form}"

    @property
    def predicted(self) -> str:
        """What it would be as a label: class, number, or nothing."""
        if self.different < 2 or (self.form in ("text", WRITTEN) and self.different > CATEGORIES):
            return ""
        if self.form in ("text", WRITTEN) or (self.is_whole and self.different <= self._most_classes):
            return "class"
        return "number" if self.form in ("number", "whole") else ""

    @property
    def unpredictable(self) -> str:
        """Why it cannot be a label."""
        return self.unfit or ("its values are all the same" if self.different < 2 else f"it has {self.form}s")

    @property
    def _most_classes(self) -> int:
        return MANY if CLASSES.fullmatch(self.name) else FEW_CLASSES


def identifies_rows(name: str, column: Any) -> bool:
    """Whether a column only identifies the rows: by its name, and because all its values are different."""
    import pyarrow as pa

    exact = pa.types.is_integer(column.type) or pa.types.is_string(column.type)
    return bool(exact and ROW_NAMES.fullmatch(name) and len(column) > 1 and len(column.unique()) == len(column))


def table_guesses(path: Path) -> Iterator[Guess]:
    """How a table may be read: once for each column that may be predicted; one of a usual name is the usual one."""
    import pyarrow as pa

    files, testing = split_files(path, SUFFIXES)
    if not files or has_conversations(path):  # their texts are no categories
        return
    paths = resolve_files(tuple(files), "a table")
    tables = [table for _, table in read_tables(paths)]
    if marks := sorted({mark for table in tables for mark in _marks(table)}):
        tables = [table for _, table in read_tables(paths, marks)]
    alike = all(table.schema.equals(tables[0].schema) for table in tables)
    table = pa.concat_tables(tables) if alike else tables[0]
    labelled = {name: read_tables([Path(name)])[0][1].column_names for name in testing}
    columns = zip(table.column_names, table.columns, strict=True)
    first = paths[0] if len(tables) == 1 else None
    seen = [_seen(name, column, first) for name, column in columns if not identifies_rows(name, column)]
    labels = [one for one in seen if one.predicted]
    usual = [one for one in labels if USUAL.fullmatch(one.name)]
    usable = [one for one in seen if not one.unfit]
    labels = [label for label in labels if any(one != label for one in usable)]
    if not labels:
        why = ", ".join(f"{one.name}: {one.unfit or f'{one.different} different values'}" for one in seen[:SHOWN])
        message = f"{path}: is a table of {table.num_rows:,} rows without a column to predict from others ({why})"
        raise DataError(message, "it needs two columns that are numbers, dates or few different texts")
    for label in labels:
        own = [name for name in testing if label.name in labelled[name]]
        guess = _guess(files, own, sum(one.num_rows for one in tables), seen, label, marks)
        without = tuple(f"left out: {name}, which has no {label.name!r}" for name in testing if name not in own)
        unfit = {one.name: one.unpredictable for one in seen if not one.predicted}
        yield replace(guess, usual=usual == [label], notes=(*guess.notes, *without), unfit=unfit)


def _marks(table: Any) -> Iterator[str]:
    """Texts among the numbers of a table that mean that one is missing."""
    import pyarrow as pa

    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            yield from marks_of_missing(column)


def _seen(name: str, column: Any, path: Path | None) -> Seen:
    """What a column holds; `path`: the file that it is of, if it is of one."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    form, empty, odd = str(kind), 0, ""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        texts = column.cast("string").unique().to_pylist()
        empty = sum(1 for text in column.to_pylist() if text == "")
        form = WRITTEN if written_as_texts(texts) else "text"
        odd = odd_texts(path, column) if form == WRITTEN and path else ""
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        form = "whole"
    elif pa.types.is_floating(kind):
        form = "number"
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        form = "date"
    values = column.drop_null().unique()
    is_whole = form == "whole"
    if form == "number":
        numbers = values.to_numpy()
        is_whole = bool(np.isfinite(numbers).all() and (numbers == np.floor(numbers)).all())
    return Seen(name, form, len(values), column.null_count + empty, is_whole, odd)


def _guess(
    files: list[str], testing: list[str], rows: int, seen: list[Seen], label: Seen, marks: Sequence[str]
) -> Guess:
    used = [one for one in seen if one != label and not one.unfit]
    left = [one for one in seen if one != label and one.unfit]
    section: dict[str, Any] = {"files": files, "label": label.name}
    section |= {"test_files": testing} if testing else {"test": 0.2} if rows < FEW else {}
    comments = {"test": "the share that is held out"}
    comments |= {"label": f"a class, one of {label.different}" if label.predicted == "class" else ""}
    if label.predicted == "number":
        section["predict"], comments["predict"] = "number", "or class: each different value one"
    if left:
        section["columns"] = [one.name for one in used]
        comments["columns"] = "without " + _listed({one.name: one.unfit for one in left})
    gaps = [one for one in used if one.missing and one.form in ("number", "whole", "date")]
    if marks:
        section["missing_texts"], comments["missing_texts"] = list(marks), "found among numbers: missing values"
    if gaps:
        section["missing"] = "median"
        comments["missing"] = "numbers are missing in " + _listed({one.name: f"{one.missing:,}" for one in gaps})
    forms = {"number": "of numbers", "text": "of texts", "date": "of dates"}
    counts = {form: sum(one.form.replace("whole", "number") == form for one in used) for form in forms}
    columns = ", ".join(f"{count} {forms[form]}" for form, count in counts.items() if count)
    what = f"{label.different:,} classes" if label.predicted == "class" else f"{label.different:,} different numbers"
    more = f" in {len(files)} files" if len(files) > 1 else ""
    return Guess(
        f"a table of {rows:,} rows{more}: columns {columns}; {label.name!r} is predicted, {what}",
        section,
        f"--label {shlex.quote(label.name)}",
        comments,
        tuple(f"column {one.name!r} cannot be used: {one.unfit}" for one in left),
        label=label.name,
    )


def _listed(found: Mapping[str, str]) -> str:
    shown = [f"{name} ({why})" for name, why in list(found.items())[:SHOWN]]
    return ", ".join(shown) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
