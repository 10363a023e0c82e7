"""`dtrain help`: keys, kinds, errors; and completion in real shells."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dtrain.cli import completion
from dtrain.cli.help_topics import explained, metrics, pages
from dtrain.core import errors
from dtrain.recipe.keys import keys, known_part
from dtrain.recipe.yaml import parse
from tests.conftest import Dtrain

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DtrainError)]
ROOT = Path(__file__).parents[2]


def test_every_key_has_a_meaning_and_is_explained() -> None:
    found = keys()
    assert len(found) > 400
    assert [key.path for key in found if not key.text] == []
    assert not any(re.search(r"\b[A-Z][a-z]+(?:[A-Z]\w+)?\b", key.type) for key in found)  # no names of classes
    for path in {key.path for key in found}:
        lines = explained(path)
        assert lines[0] == path
        inner = [
            line for line in lines if re.match(r"  [a-z0-9_]+  ", line) and not re.match("  (type|default) ", line)
        ]
        assert len(inner) == len(set(inner)), path


def test_examples_are_values_that_the_command_line_takes() -> None:
    for path in {key.path for key in keys() if key.typed}:
        for line in explained(path):
            if line.startswith("  example  "):
                (word,) = shlex.split(line.removeprefix("  example  "))
                assert "value" in dict(parse(f"value: {word.partition('=')[2]}\n", "").plain())


@pytest.mark.slow
def test_every_metric_that_a_run_writes_is_explained(dtrain: Dtrain, tmp_path: Path) -> None:
    dtrain(
        "run", "mlp-digits", "epochs=null", "steps=2", "optimizer.schedule=constant", "track={every: 1, norms: true}"
    )
    lines = (tmp_path / "runs/mlp-digits/metrics.jsonl").read_text().splitlines()
    for name in {name for line in lines for name in json.loads(line)} - {"step"}:
        known = re.sub(r"^(norm/\w+)/.*", r"\1/PATH", name)
        assert re.match(rf"{known}: a metric, .*\n\n  [A-Z\dn].*\.\n", "\n".join(explained(known))), name
    assert all(metric.meaning for metric in metrics().values())
    assert "there is no help on 'accurcy'; on accuracy:" in dtrain("help", "accurcy").stderr


@pytest.mark.parametrize(
    ("topic", "key"),
    [
        ("mesh.foo", "mesh"), ("track.to.0.foo", "track.to"), ("parts.base.foo", "parts"), ("foo", ""),
        ("optimizer.groups.0.foo", "optimizer.groups"), ("model.hidden.0", "model.hidden"),
        ("launch.acelerators", "launch"),
    ],
)  # fmt: skip
def test_errors_name_the_longest_part_of_a_path_that_is_explained(topic: str, key: str) -> None:
    assert known_part(topic) == key
    assert not key or explained(key)


def test_a_key_is_explained_with_type_default_and_an_example() -> None:
    text = "\n".join(explained("lr"))
    assert text.startswith("optimizer.lr\n")
    for part in ("Peak learning rate", "number > 0", "it must be given", "example  optimizer.lr=", "mlp-digits"):
        assert part in text
    assert "default  1\n" in "\n".join([*explained("accumulate"), ""])
    assert "of mlp" in "\n".join(explained("model.hidden"))


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("optimizer.groups.0.lr", "optimizer.groups.N.lr"), ("parts.base.run", "parts.NAME.run"),
        ("data.sources.2.data.files", "data.sources.N.data.files"), ("optimizer.lr=", "optimizer.lr"),
    ],
)  # fmt: skip
def test_keys_of_lists_and_of_names_are_found_as_they_are_typed(typed: str, key: str) -> None:
    assert explained(typed)[0] == key


def test_sections_list_their_kinds_and_kinds_their_keys() -> None:
    assert sum(line.strip().startswith("cosine ") for line in explained("optimizer.schedule")) == 1
    assert any("match" in line for line in explained("optimizer.groups"))
    assert '  default  {"kind": "auto"}' in explained("engine")
    assert not any(line.startswith("  default") for line in explained("model.kind"))
    assert any(line.strip().startswith("adamw ") for line in explained("optimizer"))
    assert any(line.strip().startswith("patch ") for line in explained("vit"))
    assert [line for line in explained("custom") if "{kind: custom}" in line] != []


def test_every_error_has_a_page_and_every_page_its_exit_code() -> None:
    found = pages()
    for kind in KINDS:
        assert kind.topic in found, kind
        assert f"Exit code {kind.exit_code}" in found[kind.topic] or kind.exit_code in (0, 70), kind
    source = "".join(path.read_text() for path in (ROOT / "dtrain").rglob("*.py"))
    assert set(re.findall(r'"(E-[A-Z-]+)"', source)) == set(found)
    for code in {kind.exit_code for kind in KINDS} - {0}:
        assert explained(str(code))
    assert explained("e-data")[0] == "E-DATA"


def test_errors_end_with_what_explains_them(in_process: Dtrain, tmp_path: Path) -> None:
    def more(*words: str, code: int) -> str:
        last = in_process(*words, code=code).stderr.splitlines()[-1]
        assert last.startswith("more: dtrain help ")
        return last.rpartition(" ")[2]

    (tmp_path / "r.yaml").write_text("model: mlp\ndata: digits\noptimizer: {kind: adamw, lr: a}\nbatch: 8\nsteps: 1\n")
    assert more("check", str(tmp_path / "r.yaml"), code=2) == "optimizer.lr"
    assert more("check", "mlp-digits", "mesh.data=3", code=2) == "batch"
    for wrong in (
        "mesh.foo=1",
        "foo=1",
        "optimizer.groups=[{foo: 1, match: x}]",
        "parts.base.foo=1",
        "track.to=[{a: 1}]",
    ):
        topic = more("check", "mlp-digits", wrong, code=2)
        assert in_process("help", topic).stdout.startswith(topic), wrong
    assert more("check", str(tmp_path / "none.yaml"), code=2) == "E-RECIPE"
    (tmp_path / "empty.csv").write_text("")
    assert more("new", str(tmp_path / "empty.csv"), code=4) == "E-DATA"


def test_a_kind_may_be_named_with_its_section(in_process: Dtrain) -> None:
    assert in_process("help", "data.kind.preference").stdout == in_process("help", "preference").stdout
    assert in_process("help", "objective.kind.dpo").stdout.startswith("objective: {kind: dpo}")
    assert "there is no help on 'data.kind.dpo'; on data.kind:" in in_process("help", "data.kind.dpo").stderr


def test_a_name_of_a_verb_and_a_kind_explains_both(in_process: Dtrain) -> None:
    shown = in_process("help", "chat").stdout
    assert shown.startswith("data: {kind: chat}")
    assert shown.endswith("the verb: dtrain help generate\n")
    shown = in_process("help", "stop").stdout
    assert shown.startswith("stop\n\n  The run ends before its last step")
    assert "the verb: dtrain help launch stop" in shown


def test_a_value_names_the_keys_that_have_it(in_process: Dtrain) -> None:
    one = in_process("help", "relu2").stdout
    assert one.startswith("relu2 is a value of one key:\n\nmodel.feed_forward\n")
    assert "are not gated" in one
    several = in_process("help", "bfloat16").stdout
    assert "precision.compute" in several
    assert "precision.params" in several
    assert "model.remat" in in_process("help", "full").stdout, "a list, too"
    assert "class_weights" in in_process("help", "balanced").stdout


def test_a_misspelt_topic_is_the_nearest_one_or_refused(in_process: Dtrain) -> None:
    near = in_process("help", "optimizer.lrr")
    assert near.stdout.startswith("optimizer.lr\n")
    assert "there is no help on 'optimizer.lrr'; on optimizer.lr:" in near.stderr
    assert "there is no help on 'xyzzy'" in in_process("help", "xyzzy", code=2).stderr


def script_for(shell: str, folder: Path) -> Path:
    path = folder / f"completion.{shell}"
    path.write_text(completion.script(shell))
    return path


EXPECTED = {
    "dtrain run mlp-": "mlp-mnist",
    "dtrain run mlp-digits optimizer.sched": "optimizer.schedule.warmup=",
    "dtrain run mlp-digits engine=sh": "engine=shard_map",
    "dtrain help E-DATA-": "E-DATA-CHANGED",
    "dtrain verif": "verify",
    "dtrain recipes show mlp-": "mlp-mnist",
    "dtrain profile mlp-m": "mlp-mnist",
    "dtrain sweep mlp-digits optimizer.sched": "optimizer.schedule.warmup=",
}


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(dtrain: Dtrain, tmp_path: Path) -> None:
    path = script_for("fish", tmp_path)
    for words, expected in EXPECTED.items():
        command = f"source {path}; complete -C '{words}'"
        done = subprocess.run(
            ["fish", "-N", "-c", command], capture_output=True, text=True, check=True, env=with_path()
        )
        assert expected in [line.partition("\t")[0] for line in done.stdout.splitlines()], words


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_completes(tmp_path: Path) -> None:
    """A zsh of its own, in a pseudo-terminal, in which a word and TAB are typed."""
    path = script_for("zsh", tmp_path)
    for words, expected in EXPECTED.items():
        program = (
            "zmodload zsh/zpty; zpty z zsh -f -i\n"
            f"zpty -w z 'PROMPT=; autoload -U compinit; compinit -u -D; source {path}; setopt no_beep; echo rea''dy'\n"
            "zpty -r -m z line '*ready*'\n"
            f"zpty -n -w z $'{words}\\t\\t'\n"
            "repeat 200 { sleep 0.05; zpty -r -t z part && all+=$part; [[ $all == *'" + expected + "'* ]] && break }\n"
            "print -r -- $all; zpty -d z\n"
        )
        done = subprocess.run(
            ["zsh", "-f", "-c", program], capture_output=True, text=True, check=False, env=with_path(), timeout=60
        )
        assert expected in done.stdout, (words, done.stdout, done.stderr)


def with_path() -> dict[str, str]:
    """The environment, with the `dtrain` of this Python first."""
    import os
    import sys

    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "TERM": "xterm"}


def test_the_script_of_a_shell_is_printed_by_its_name(in_process: Dtrain) -> None:
    assert "#compdef dtrain" in in_process("--show-completion", "zsh").stdout
    assert "complete --command dtrain" in in_process("--show-completion", "fish").stdout
    assert "there is no completion for tcsh" in in_process("--show-completion", "tcsh", code=2).stderr
