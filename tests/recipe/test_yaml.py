import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.core.errors import RecipeError
from dtrain.recipe.yaml import Mark, dump, parse, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("010", 10),
        ("0x10", 16),
        ("no", "no"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("2026-11-21", "2026-11-21"),
        ("true", True),
        ("~", None),
        (".inf", float("inf")),
        ("1_000", "1_000"),
        ("-3.", -3.0),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse(f"a: {text}", "x").plain()["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"x:3:1  a: duplicate key; first at x:1:1"),
        ("a: &b 1\nc: *b", r"x:2:4  aliases"),
        ("a: !!python/name:os.system x", r"x:1:4  tags"),
        ("1: a", r"x:1:1  a key must be a string"),
        ("a: [1, 2", r"x:1:9"),
        ("\ta: 1", r"x:1:1"),
        ("a: " + "[" * 40, r"nested more than 32 levels deep"),
        ("k" * 300 + ": 1", r"x:1:1  a key of 300 characters; at most 200"),
        ('a: "\\UFFFFFFFF"', r"x: "),
        ("a: [" + "1," * 15_000 + "]", r"x:1:19997  a recipe has at most 10,000 keys and values"),
    ],
)
def test_what_is_not_strict_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse(text, "x")


def test_files_are_bounded_and_utf8(tmp_path) -> None:
    (tmp_path / "big.yaml").write_text("a: " + "x" * 300_000)
    with pytest.raises(RecipeError, match="at most 262,144"):
        read(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(RecipeError, match="not UTF-8"):
        read(tmp_path / "latin.yaml")


def test_every_value_has_its_position() -> None:
    tree = parse("a:\n  b: [1, 2]\n", "x")
    assert tree.value["a"].value["b"].value[1].mark == Mark("x", 2, 10)
    assert tree.value["a"].key("b") == Mark("x", 2, 3)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


def tuples(value: object) -> object:
    if isinstance(value, list):
        return tuple(tuples(item) for item in value)
    return {key: tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=6), trees, max_size=4))
def test_what_is_written_reads_back_the_same(value: dict[str, object]) -> None:
    assert parse(dump(value), "x").plain() == tuples(value)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text, "x")
    except RecipeError as error:
        assert str(error)
