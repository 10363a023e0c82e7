"""Pages of the site that are written from the code: verbs, keys of a recipe, metrics, exit codes, the public API."""

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; mkdocs calls this before it reads any page."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(make()) + "\n"))
    return files


SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
"""What the offline plugin loads from elsewhere, so that the search works where a page is opened as a file."""


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load our own in its place: the site needs no network."""
    del config
    return output.replace(SHIM, f'<script src="{get_relative_url("worker.js", page.url)}"></script>')


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Leave it out of the page for addresses that do not exist, which only a server shows."""
    del template_name, config
    return output_content.replace(SHIM, "")


def verbs() -> Iterator[str]:
    """Every verb with its help, arguments and options."""
    from typer.main import get_command

    from dtrain.cli import app

    yield "# Verbs\n"
    yield "`dtrain VERB --help` prints the same.\n"
    yield from _commands(get_command(app), "dtrain")


def _commands(group: Any, prefix: str) -> Iterator[str]:
    for name, command in group.commands.items():
        whole = f"{prefix} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, whole)
            continue
        yield f"## {whole}\n"
        yield f"{_cell(command.help or '')}\n"
        example = re.sub(r"^Examples?: ", "", command.epilog or "").replace("; ", "\n")
        yield f"```text\n{example}\n```\n"
        rows = [one for one in command.params if not getattr(one, "hidden", False)]
        yield "| argument or option | meaning |\n|---|---|"
        for one in rows:
            spelling = one.metavar if one.param_type_name == "argument" else ", ".join([*one.opts, *one.secondary_opts])
            if one.param_type_name == "argument" and not spelling:
                spelling = (one.name or "").upper()
            default = (
                "" if one.default in (None, False, "", ()) or callable(one.default) else f" Default: `{one.default}`."
            )
            yield f"| `{_cell(str(spelling))}` | {_cell(one.help or '')}{default} |"
        yield ""


def recipe_keys() -> Iterator[str]:
    """Every key of a recipe, one table for each section."""
    from dtrain.recipe.keys import keys

    yield "# Keys of a recipe\n"
    yield "`dtrain recipes schema` prints the same as JSON Schema for editors."
    yield "\n`dtrain help KEY` explains one. A key without default need not be given.\n"
    sections: dict[str, dict[str, str]] = {}
    for key in keys():
        parent, _, name = key.path.rpartition(".")
        default = f"`{key.default}`" if key.default and len(key.default) < 60 else ""
        default = "must be given" if key.required else default
        row = f"| `{name}` | {_cell(key.type)} | {_cell(default)} | {_cell(key.text)} |"
        section = f"{parent} of kind {key.kind}" if key.kind else parent or "Top level"
        sections.setdefault(section, {}).setdefault(name, row)
    for section, rows in sections.items():
        yield f"\n## {section}\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield from (row for name, row in rows.items() if name != "kind")


def readers() -> Iterator[str]:
    """What each reader of files uses, ignores and refuses."""
    from dtrain.data import (
        conversations,
        folder_layout,
        image_files,
        records,
        table,
        table_files,
        tokenizer_folder,
    )
    from dtrain.models.families import fields as config_fields
    from dtrain.weights import peft

    def listed(names: Any) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    yield "# What is read\n"
    yield "What dtrain uses, ignores and refuses of files that others wrote. Fields of chat records and files"
    yield "in folders of pictures that are in none of these lists are named once: by `check`, by `data show` and at"
    yield "the start of a run; fields of config.json that are in none, by `import`.\n"
    yield "## Records of chat data\n"
    yield f"Forms: {'; '.join(' and '.join(f'`{name}`' for name in form) for form in conversations.FORMS)}."
    yield f"Beside them: `system`, {listed(conversations.CONTEXT)}, and for instructions `input` and `history`.\n"
    known = f"{listed(conversations.USUAL)}; read as one of these: {listed(conversations.ROLES)}"
    yield f"Roles: {known}; others by `data.roles`.\n"
    yield f"Marks of a message on whether it is learned: {listed(conversations.WEIGHTS)}.\n"
    yield "| ignored | why |\n|---|---|"
    for reason in dict.fromkeys(conversations.IGNORED.values()):
        yield f"| {listed(name for name, own in conversations.IGNORED.items() if own == reason)} | {reason} |"
    yield "\n| refused, unless in `data.ignore` | what to do |\n|---|---|"
    for hint in dict.fromkeys(conversations.REFUSED.values()):
        names = [name for name, own in conversations.REFUSED.items() if own == hint]
        yield f"| {listed(names)} | {_cell(hint.format(name='NAME'))} |"
    yield f"\nRefused where the template does not write them: `tools`, `documents`, {listed(conversations.MATTERS)}.\n"
    yield f"Files: {listed(records.SUFFIXES)}, some of them compressed.\n"
    yield "## Tokenizers\n"
    yield "Special tokens come from tokenizer_config.json, special_tokens_map.json, the defaults of the class, and"
    yield "`bos_token_id` and `eos_token_id` of config.json and generation_config.json, in this order.\n"
    yield "| class | tokens by default |\n|---|---|"
    for name, tokens in tokenizer_folder.CLASS_TOKENS.items():
        yield f"| `{name}` | {', '.join(f'{key} `{text}`' for key, text in tokens.items())} |"
    yield "\n## Folders of pictures\n"
    yield f"Read: {listed(folder_layout.SUFFIXES)}, by content {', '.join(image_files.FORMATS)}.\n"
    for hint in dict.fromkeys(folder_layout.UNREAD.values()):
        names = [name for name, own in folder_layout.UNREAD.items() if own == hint]
        yield f"- refused, unless in `data.ignore`: {listed(names)}: {hint}"
    yield "\n| top folder, in any case | is |\n|---|---|"
    for part in dict.fromkeys(folder_layout.SPLITS.values()):
        yield f"| {listed(name for name, own in folder_layout.SPLITS.items() if own == part)} | {part} |"
    yield "\n## Tables\n"
    yield f"Files: {listed(table_files.SUFFIXES)}. Columns of numbers, truth values, dates and texts of at most"
    yield f"{table.CATEGORIES} different values are used; other types are refused. Columns named like `id`, `row_id`,"
    yield "`PassengerId` or `__index_level_0__` are left out, and named, if no two rows have the same value, unless"
    yield "`data.columns` lists them. A CSV file may be UTF-16, and separated by semicolons.\n"
    yield "## config.json\n"
    yield f"Ignored, since they are about training, saving or text: {listed(config_fields.IGNORED)}.\n"
    yield "## adapter_config.json\n"
    yield f"Refused at other values than those of plain LoRA: {listed(peft.PLAIN | peft.NEUTRAL)},"
    yield f"`init_lora_weights`, and fields that are not known. Ignored: {listed(peft.IGNORED)}."


def metrics_and_codes() -> Iterator[str]:
    """Metrics that dtrain computes, and exit codes."""
    from dtrain.core import errors
    from dtrain.core.metrics import LOGGED, MODELS
    from dtrain.models.measures import CLASSIFICATION

    yield "# Metrics and exit codes\n"
    yield "A model declares its metrics with `dtrain.Metric`; these are dtrain's own.\n"
    yield "`train/NAME` is of a batch, `eval/NAME` of all held-out examples; `dtrain help NAME` says the same.\n"
    yield "| metric | better | unit | meaning |\n|---|---|---|---|"
    better = {True: "higher", False: "lower", None: ""}
    for metric in (*MODELS, *CLASSIFICATION, *LOGGED):
        yield f"| `{metric.name}` | {better[metric.higher_is_better]} | {metric.unit} | {_cell(metric.meaning)} |"
    yield "\n## Exit codes\n"
    yield "| code | when |\n|---|---|\n| 0 | done |"
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DtrainError)]
    for kind in sorted(kinds, key=lambda kind: (kind.exit_code, kind.__name__)):
        yield f"| {kind.exit_code} | {_cell((inspect.getdoc(kind) or kind.__name__).splitlines()[0])} |"


def api() -> Iterator[str]:
    """The public names of the package with their signatures and docstrings."""
    import dtrain

    yield "# API\n"
    yield "What `import dtrain` exports. Everything else may change between versions.\n"
    for name in sorted(dtrain.__all__, key=str.lower):
        value = getattr(dtrain, name)
        yield f"## dtrain.{name}\n"
        if inspect.ismodule(value):
            yield f"{inspect.getdoc(value)}\n"
            for inner, member in inspect.getmembers(value, inspect.isfunction):
                if member.__module__ != value.__name__ or inner.startswith("_"):
                    continue
                yield f"### dtrain.{name}.{inner}\n"
                yield from _documented(inner, member)
        else:
            yield from _documented(name, value)


def _documented(name: str, value: Any) -> Iterator[str]:
    if not callable(value) or not hasattr(value, "__doc__"):
        return
    with suppress(TypeError, ValueError):
        yield f"```python\n{name}{_plain(str(inspect.signature(value)))}\n```\n"
    yield f"{inspect.getdoc(value) or ''}\n"


def _plain(signature: str) -> str:
    """A signature without the addresses of default objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", signature)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def measurements() -> Iterator[str]:
    """The newest recorded result of each program in benchmarks/."""
    yield "# Measurements\n"
    yield "Written by `make bench`, which runs the programs of `benchmarks/`; each names its target and its rivals. The"
    yield "machines are small and shared: look at the ratios, whose two sides alternate.\n"
    newest = {path.stem[len("2026-01-01-") :]: path for path in sorted(RESULTS.glob("*.md"))}
    for name, path in sorted(newest.items()):
        about = ast.get_docstring(ast.parse((RESULTS.parent / f"{name}.py").read_text())) or ""
        head = about.split("\n\n")[0].replace("\n", " ")
        yield f"## {name}\n\n{head}\n\n" + path.read_text().partition("\n\n")[2]


PAGES = {
    "verbs": verbs, "keys": recipe_keys, "readers": readers, "metrics": metrics_and_codes, "api": api,
    "measurements": measurements,
}  # fmt: skip
