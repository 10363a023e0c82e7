"""dtrain help"""

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.arguments import Debug
from dtrain.cli.completion import topics
from dtrain.cli.exits import exits
from dtrain.cli.synonyms import SYNONYMS, key_of

if TYPE_CHECKING:
    from dtrain.core.metrics import Metric
    from dtrain.recipe.keys import Key

WIDTH = 100
SHOWN = 6
"""Recipes that are named as examples of a key."""
CODE = re.compile(r"E-[A-Z-]+|\d+")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""

    @app.command(
        "help",
        epilog="Examples: dtrain help optimizer.lr; dtrain help vit; dtrain help mfu; dtrain help E-DATA",
    )
    def show(
        context: typer.Context,
        topic: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="TOPIC",
                help="A key of the recipe, a value, a section, a kind, a metric, an error, an exit code, a verb.",
                autocompletion=topics,
            ),
        ] = None,
        debug: Debug = False,
    ) -> None:
        """Explain a key of the recipe, one of its values, a kind, a metric, an error or a verb, without a network."""
        with exits(debug):
            from dtrain.core.errors import RecipeError

            root = context.find_root()
            topic = [word for word in topic or () if word.strip()]
            if not topic:
                typer.echo("\n".join([*_verb(root, []), *overview()]))
                return
            found = _about(root, topic)
            if not found and (near := _near(root, topic[0])):
                typer.echo(f"there is no help on {' '.join(topic)[:WIDTH]!r}; on {near}:", err=True)
                found = _about(root, [near])
            if not found:
                error = RecipeError(
                    f"there is no help on {' '.join(topic)[:WIDTH]!r}", "`dtrain help` lists what there is help on"
                )
                error.topic = ""
                raise error
            typer.echo("\n".join(found).rstrip())


def overview() -> Iterator[str]:
    """What there is help on besides verbs."""
    from dtrain.recipe.keys import cached_keys

    sections = ", ".join(dict.fromkeys(key.path for key in cached_keys() if "." not in key.path))
    for heading, names in (("Sections and keys of a recipe", sections), ("Errors", ", ".join(pages()))):
        yield f"{heading}, each with `dtrain help NAME`:"
        yield textwrap.fill(names, WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield "Keys within a section: `dtrain help SECTION.KEY`."


def _about(root: Any, topic: Sequence[str]) -> list[str]:
    """Lines about a verb, or about anything else; of a name that is both, such as `data`, about both. Of a key that is
    also another tool's name for a verb, about the key, with a line that names the verb."""
    from dtrain.recipe.keys import cached_keys, named_kinds

    word = topic[0] if len(topic) == 1 else ""
    verb, keys = _verb(root, topic), cached_keys()
    named = any(key.path == word for key in keys) or word in named_kinds(keys)
    if verb and not named:
        return verb
    other = "" if verb else SYNONYMS.get(word, "")
    if other and not named:
        return _verb(root, other.split())
    about = explained(word) or explained(key_of(word)) if word else []
    return [*verb, *about, *(["", f"the verb: dtrain help {other}"] if other else [])]


def pages() -> dict[str, str]:
    """The sections of docs/errors.md by their codes."""
    inside = Path(__file__).parents[1] / "errors.md"
    path = inside if inside.is_file() else Path(__file__).parents[2] / "docs" / "errors.md"
    parts = re.split(r"^## (E-[A-Z-]+)\n", path.read_text(), flags=re.MULTILINE)
    return {code: text.strip() for code, text in zip(parts[1::2], parts[2::2], strict=True)}


def explained(topic: str) -> list[str]:
    """Lines about an error, a metric, a key, a section or a kind; none if it is none of these."""
    if CODE.fullmatch(topic.upper()):
        return _page(topic.upper())
    own, metric = _of_recipe(topic), _metric(topic)
    return [*own, *([""] if own and metric else []), *metric]


def _of_recipe(topic: str) -> list[str]:
    """Lines about a key, a section, a kind or a value."""
    from dtrain.recipe.keys import cached_keys, known_part, named_kinds

    keys = cached_keys()
    path = topic.rstrip(".=")
    known = known_part(path)  # optimizer.groups.N.lr for optimizer.groups.0.lr
    path = known if known and known.count(".") == path.count(".") else path
    own = [key for key in keys if key.path == path]
    section, _, kind = path.partition(".kind.")
    if of_section := [key for key in named_kinds(keys).get(kind, []) if key.path == f"{section}.kind"]:
        return _kind(of_section[0], keys)
    if not own and "." not in path:  # the last part of a path, where it is of one key only
        named = [key for key in keys if key.path.rpartition(".")[2] == path]
        whole = list(dict.fromkeys(key.path for key in named if key.typed) or dict.fromkeys(key.path for key in named))
        kinds = named_kinds(keys).get(path, [])
        if kinds:
            return [line for key in kinds for line in _kind(key, keys)]
        if len(whole) > 1:
            return [f"{path} is a key of several sections: {', '.join(whole)}"]
        own = [key for key in keys if whole and key.path == whole[0]]
        if not own:
            return _value(path, keys)
    return _key(own, keys) if own else []


def _value(word: str, keys: "Sequence[Key]") -> list[str]:
    """The keys that may have that value; all about it where it is one."""
    having = [key for key in keys if word in key.values]
    paths = list(dict.fromkeys(key.path for key in having))
    if not paths:
        return []
    about = _key(having, keys) if len(paths) == 1 else [f"  {path}" for path in paths]
    return [f"{word} is a value of {'one key' if len(paths) == 1 else f'{len(paths)} keys'}:", "", *about]


def metrics() -> dict[str, "Metric"]:
    """The metrics that dtrain declares, by their names as they are logged, and without the group."""
    from dtrain.core.metrics import LOGGED, MODELS
    from dtrain.models.measures import CLASSIFICATION

    found = {}
    for metric in (*MODELS, *CLASSIFICATION, *LOGGED):
        group, _, short = metric.name.partition("/")
        found |= {metric.name: metric} | ({} if group in ("norm", "rows", "plan") or not short else {short: metric})
        found |= {} if short else {f"train/{metric.name}": metric, f"eval/{metric.name}": metric}
    return found


def _metric(name: str) -> list[str]:
    """What a metric means; nothing if there is none of that name."""
    metric = metrics().get(name)
    if not metric:
        return []
    better = {True: ", higher is better", False: ", lower is better", None: ""}[metric.higher_is_better]
    unit = {"": "a number", "%": "a share, in per cent"}.get(metric.unit, f"in {metric.unit}")
    return [f"{name}: a metric, {unit}{better}", "", *_wrapped(metric.meaning), "", "  written to RUN/metrics.jsonl"]


def _page(code: str) -> list[str]:
    """A section of docs/errors.md, by its code or by an exit code."""
    found = pages()
    if code in found:
        return [code, "", found[code]]
    own = [name for name, text in found.items() if re.match(rf"Exit code {re.escape(code)}\b", text)]
    return [line for name in own for line in (name, "", found[name], "")]


def _key(own: "Sequence[Key]", keys: "Sequence[Key]") -> list[str]:
    """All about a key: for each meaning, the kinds that have it."""
    path = own[0].path
    lines = [path]
    meanings: dict[tuple[str, str, str], list[str]] = {}
    for key in own:
        default = "it must be given" if key.required else key.default or "not set"
        meanings.setdefault((key.text, key.type, default), []).append(key.kind)
    for (text, kind, default), having in meanings.items():
        names = ", ".join(filter(None, dict.fromkeys(having)))
        lines += ["", *([f"of {names}"] if names else []), *_wrapped(text)]
        lines += [] if path.endswith("kind") else [f"  type     {kind}", f"  default  {default}"]
    inner = _inner(path, keys)
    lines += ["", *inner] if inner else []
    examples = _examples(path)
    if examples:
        value = next(iter(examples))
        lines += ["", f"  example  {path}={shlex.quote(value)}"] if len(value) < WIDTH // 2 and own[0].typed else [""]
        lines += [f"  used in  {', '.join(list(dict.fromkeys(n for v in examples.values() for n in v))[:SHOWN])}"]
    return lines


def _inner(path: str, keys: "Sequence[Key]") -> list[str]:
    """The kinds and the keys of a section; of one that is a list or has names, those of each."""
    from dtrain.recipe.keys import NAME, NUMBER, has_inner

    known = {key.path for key in keys}
    path = next((f"{path}.{place}" for place in (NUMBER, NAME) if has_inner(known, f"{path}.{place}")), path)
    depth = path.count(".") + 1
    inside = [key for key in keys if key.path.startswith(f"{path}.") and key.path.count(".") == depth]
    kinds = [key for key in inside if key.path == f"{path}.kind"]
    lines = []
    if kinds:
        width = max(len(key.kind) for key in kinds)
        lines += ["kinds, each with `dtrain help KIND`:"]
        lines += [f"  {key.kind:<{width}}  {_first(key.text)}" for key in kinds]
        return lines
    names = list(dict.fromkeys(key.path.rpartition(".")[2] for key in inside))
    return [f"keys: {', '.join(names)}"] if names else []


def _kind(key: "Key", keys: "Sequence[Key]") -> list[str]:
    """A kind of a section, with its keys."""
    section, _ = key.section
    own = [one for one in keys if one.section == key.section and one != key]
    width = max((len(one.path.rpartition(".")[2]) for one in own), default=0)
    lines = [f"{section}: {{kind: {key.kind}}}", "", *_wrapped(key.text), ""]
    lines += [f"  {one.path.rpartition('.')[2]:<{width}}  {_first(one.text)}" for one in own]
    return [*lines, ""]


def _first(text: str) -> str:
    return textwrap.shorten(re.split(r"(?<!al\.)(?<=[a-z)\]]\.) |; ", text)[0], WIDTH - 20, placeholder=" ...")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _examples(path: str) -> dict[str, list[str]]:
    """The values that recipes which come with dtrain give the key, and the recipes."""
    import json

    found: dict[str, list[str]] = {}
    for name, value in _shipped().items():
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            plain = text.replace('"', "")
            text = plain if isinstance(value, str) or _same(plain, value) else text
            found.setdefault(text, []).append(name)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


@cache
def _shipped() -> dict[str, Any]:
    """The recipes that come with dtrain, as plain values."""
    from dtrain.core.shipped import shipped
    from dtrain.recipe.yaml import parse

    return {name: parse(file.read_text(), name).plain() for name, file in shipped().items()}


def _same(text: str, value: Any) -> bool:
    """Whether the text is the value in YAML."""
    from dtrain.core.errors import RecipeError
    from dtrain.recipe.yaml import parse

    try:
        found = parse(f"value: {text}\n", "").plain()["value"]
    except RecipeError:
        return False
    return (list(found) if isinstance(found, tuple) else found) == (list(value) if isinstance(value, tuple) else value)


def _verb(root: Any, words: Sequence[str]) -> list[str]:
    """The help of a verb; none if there is no such verb."""
    command, context = root.command, root
    for word in words:
        inner = getattr(command, "commands", {})
        if word not in inner:
            return []
        command = inner[word]
        context = typer.Context(command, info_name=word, parent=context)
    return [command.get_help(context).rstrip(), ""]


def _near(root: Any, topic: str) -> str:
    """The nearest name that there is help on; empty if none is near."""
    from difflib import get_close_matches

    names = {name.lower(): name for name in topics(root, "")}
    near = get_close_matches(topic.lower(), names, 1, 0.8)
    return names[near[0]] if near else ""
