from pathlib import Path
from typing import Any, get_args

import pytest

from dtrain.core.errors import RecipeError
from dtrain.recipe.load import given_part, load, part
from dtrain.recipe.recipe import Launch, Model
from dtrain.recipe.schema import schema
from dtrain.recipe.yaml import dump
from tests.engines import LANGUAGE_MODELS, MODELS
from tests.recipe.test_load import GOOD, write


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("data={kind: text, files: books.txt, test_files: more.txt, length: 8}", "data.test_files", ("more.txt",)),
        ("data={kind: images, root: x, size: 32}", "data.size", (32, 32)),
        ("launch={kind: ssh, hosts: ada@a}", "launch.hosts", ("ada@a",)),
        ("launch={kind: local, environment: HF_TOKEN}", "launch.environment", ("HF_TOKEN",)),
    ],
)
def test_one_stands_for_a_list_of_one(tmp_path: Path, override: str, path: str, value: object) -> None:
    model = "model={kind: decoder, vocab: 256, context: 8, layers: 1, width: 8, heads: 1}"
    found = load(write(tmp_path, GOOD), [override, *([model] if "text" in override else [])])
    section, _, key = path.partition(".")
    assert getattr(getattr(found, section), key) == value


def test_one_tracker_stands_for_a_list_of_one(tmp_path: Path) -> None:
    assert [sink.kind for sink in load(write(tmp_path, GOOD), ["track.to=tensorboard"]).track.to] == ["tensorboard"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("precision=bfloat16", "found 'bfloat16'; write {params: bfloat16} or {compute: bfloat16} or {loss: bfloat16}"),
        ("evaluate=100", "found 100; write {every: 100} or {batch: 100}"),
        ("model.sizes=64", "expected a list such as [64, 32]; found 64"),
        ("mesh.slices=2", "expected a mapping such as {key: value}; found 2"),
        ("batch=true", "batch: expected a whole number; found true"),
        ("optimizer.lr=0", "optimizer.lr: expected a number above 0; found 0"),
        ("model.activation=rellu", "expected 'relu', 'gelu' or 'tanh'; found 'rellu'; did you mean 'relu'?"),
        ("launch={kind: ssh, hosts: []}", "launch.hosts: expected a list of at least 1; found a list of 0"),
        ("launch={kind: ssh, hosts: [-oX]}", "launch.hosts.0: expected a host: a name or an IPv4 address, optionally"),
        ("launch={kind: slurm, partition: 'a b'}", "launch.partition: expected one word: letters, digits and any of"),
        ("launch={kind: local, environment: token}", "launch.environment.0: expected the name of an environment"),
        (
            "engine=5",
            "engine: expected one of auto, jit, shard_map, pmap, or a mapping with one of them as `kind`; found 5",
        ),
    ],
)
def test_a_message_states_what_is_expected(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(write(tmp_path, GOOD), [override])
    (line,) = caught.value.problems
    assert message in line


def test_every_name_has_a_sentence_in_place_of_its_pattern(tmp_path: Path) -> None:
    defs = schema()["$defs"]
    for member in get_args(Launch):
        fields = defs[member.__name__]["properties"]
        named = {key: "?" for key, part in fields.items() if "pattern" in str(part)}
        with pytest.raises(RecipeError) as caught:
            load(write(tmp_path, GOOD + f"launch: { ({'kind': member.kind} | named) }\n"))
        lines = [line for line in caught.value.problems if "found '?'" in line]
        assert len(lines) == len(named)
        assert not [line for line in lines if "match" in line or "^" in line or "another form" in line]


def test_an_editor_accepts_one_string_for_a_list() -> None:
    assert schema()["$defs"]["Text"]["properties"]["files"]["type"] == ["array", "string"]


@pytest.mark.parametrize("model", [*MODELS.values(), *LANGUAGE_MODELS.values()], ids=lambda model: model.kind)
def test_what_is_given_of_a_section_is_the_section(model: Any) -> None:
    """Without defaults, those of sections inside it included: the layers of a pattern, the rotation."""
    values = given_part(model)
    assert part(Model, values, "model") == model
    assert all(layer.get("mixer") != "attention" for layer in values.get("pattern", ()))
    assert "interleaved: false" not in dump(values)
