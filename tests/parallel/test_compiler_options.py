"""What `engine.overlap` asks of each compiler, and what happens where a compiler lacks an option."""

from typing import Any, cast

import jax
import pytest

from dtrain.core.chips import CHIPS, Chip
from dtrain.core.errors import RecipeError
from dtrain.parallel.compiler_options import ALL_REDUCE, KERNELS, PRODUCTS, SCHEDULED, SPARSECORE, WITH_KERNELS
from dtrain.parallel.engine import Warn
from dtrain.parallel.jit import Jit
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.shard_map import ShardMap
from tests.engines import LANGUAGE_MODELS

TOO_LARGE, BROKEN, ALL_REDUCE_FAILS, ALL_FAIL = "too large", "broken", "all-reduce fails", "all fail"
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"


def chip(name: str) -> Chip:
    return next(one for one in CHIPS if one.name == name)


@pytest.mark.parametrize(
    ("engine", "name", "expected"),
    [
        (ShardMap(), "v5p", SPARSECORE),
        (ShardMap(), "v6e", SPARSECORE),
        (ShardMap(), "tpu7x", SPARSECORE),
        (ShardMap(), "v5e", {}),
        (ShardMap(), "v4", KERNELS),
        (ShardMap(overlap="sparsecore"), "v4", KERNELS),
        (ShardMap(overlap="products"), "v5p", PRODUCTS),
        (ShardMap(overlap="none"), "v5p", {}),
        (ShardMap(xla={OFFLOAD: False}), "v5p", SPARSECORE | {OFFLOAD: False}),
        (Jit(), "v5p", {name: value for name, value in SPARSECORE.items() if name != WITH_KERNELS}),
        (Jit(), "v6e", SPARSECORE),
        (Jit(), "v4", {}),
        (Jit(), "v5e", {}),
        (Jit(overlap="sparsecore"), "v6e", SPARSECORE),
        (Jit(overlap="kernels"), "v6e", KERNELS),
        (Pmap(), "v5p", {}),
        (ShardMap(), "h100", {SCHEDULED: True}),
        (Jit(), "a100", {SCHEDULED: True}),
        (Jit(overlap="none"), "a100", {SCHEDULED: False}),
    ],
)
def test_each_chip_gets_its_options(engine: Jit | ShardMap | Pmap, name: str, expected: dict[str, bool]) -> None:
    found = engine.options(chip(name).platform, chip(name))
    assert found == {name: value if isinstance(value, bool) else str(value) for name, value in expected.items()}


def test_under_jit_kernels_of_experts_are_not_overlapped() -> None:
    """libtpu ended the process: "BarrierMegacore in primary or secondary region, hlo: [tgmm.1]"; and all-reduces do not
    compile for the SparseCores: "vector_store op Value element type f32 does not match bf16"."""
    v5p = chip("v5p")
    assert not any(WITH_KERNELS in Jit().chosen("tpu", v5p, experts=experts) for experts in (False, True))
    assert WITH_KERNELS not in Jit().chosen("tpu", chip("v6e"), experts=True)
    for name, experts in (("v5p", False), ("v4", False), ("v6e", True)):
        with pytest.raises(RecipeError, match=f"for {name} ends the process"):
            Jit(overlap="kernels").chosen("tpu", chip(name), experts=experts)
    assert OFFLOAD in Jit().chosen("tpu", v5p, experts=True) and ALL_REDUCE not in Jit().chosen(
        "tpu", v5p, experts=True
    )
    assert WITH_KERNELS in ShardMap().chosen("tpu", v5p, experts=True)
    tpu7x = chip("tpu7x")
    assert not any(Jit(overlap=way).chosen("tpu", tpu7x, experts=True) for way in ("auto", "none"))
    for way in ("products", "sparsecore"):
        with pytest.raises(RecipeError, match="experts for tpu7x ends the process"):
            Jit(overlap=way).chosen("tpu", tpu7x, experts=True)
    assert Jit().chosen("tpu", tpu7x) and ShardMap().chosen("tpu", tpu7x, experts=True)


def test_kernels_of_experts_named_under_jit_are_refused() -> None:
    class Recipe:
        model = LANGUAGE_MODELS["mixtral"]

    assert [key for key, *_ in Jit(overlap="kernels").problems(Recipe())] == ["engine.overlap"]
    assert not list(ShardMap(overlap="kernels").problems(Recipe())) + list(Jit().problems(Recipe()))
    Recipe.model = LANGUAGE_MODELS["llama"]
    assert not list(Jit(overlap="kernels").problems(Recipe()))


def test_a_chip_that_is_not_in_the_table_and_a_cpu_get_none() -> None:
    assert ShardMap().options("tpu", None) == {}
    assert ShardMap(overlap="kernels").chosen("cpu", None) == {}


class OlderCompiler:
    """Refuses the options that it does not know, as XLA does; the program is the options that it took."""

    def __init__(self, *unknown: str) -> None:
        self.unknown = unknown

    def compile(self, compiler_options: dict[str, Any] | None) -> dict[str, Any]:
        if self.unknown == (TOO_LARGE,):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory")
        failing = {ALL_REDUCE_FAILS: {ALL_REDUCE}, ALL_FAIL: {ALL_REDUCE, OFFLOAD}}.get(self.unknown[0], set())
        if failing & (compiler_options or {}).keys():
            raise jax.errors.JaxRuntimeError("INTERNAL: Failed to verify: all-reduce.90")
        if self.unknown == (BROKEN,):
            raise jax.errors.JaxRuntimeError("INTERNAL: Failed to verify lowered MLO module.")
        for name in compiler_options or {}:
            if name in self.unknown:
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        return compiler_options or {}


class Confused:
    """Refuses an option that it was not given."""

    def compile(self, compiler_options: dict[str, Any] | None) -> None:
        del compiler_options
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'another'")


def built(engine: ShardMap, *unknown: str, warn: Warn = lambda _: None) -> Any:
    return engine.build(cast("Any", OlderCompiler(*unknown)), engine.options("tpu", chip("v5p")), warn)


def test_what_a_compiler_lacks_is_left_out_unless_the_recipe_names_it() -> None:
    first, *others = SPARSECORE
    assert built(ShardMap(), first, OFFLOAD).keys() == set(others) - {OFFLOAD}
    with pytest.raises(RecipeError, match=f"engine.overlap: this compiler has no option {OFFLOAD}, which 'sparsecore'"):
        built(ShardMap(overlap="sparsecore"), OFFLOAD)
    with pytest.raises(RecipeError, match="one operation of the step exceeds the memory that it may take") as refused:
        built(ShardMap(overlap="sparsecore"), TOO_LARGE)
    assert refused.value.hint == "try engine.overlap=none, or engine.xla={xla_tpu_scoped_vmem_limit_kib: 65536}"
    with pytest.raises(RecipeError, match="the compiler failed: INTERNAL: Failed to verify") as failed:
        built(ShardMap(overlap="kernels"), BROKEN)
    assert failed.value.hint == "try engine.overlap=none"
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'another'"):
        ShardMap().build(cast("Any", Confused()), {}, lambda _: None)
    with pytest.raises(RecipeError, match=f"engine.xla.{OFFLOAD}: this compiler has no such option"):
        built(ShardMap(xla={OFFLOAD: False}), OFFLOAD)


def test_what_the_compiler_fails_with_of_auto_is_left_out_with_a_warning() -> None:
    said: list[str] = []
    own = ShardMap(xla={"xla_tpu_scoped_vmem_limit_kib": 1024, "other": True})
    reason = "INTERNAL: Failed to verify: all-reduce.90"
    found = built(own, ALL_REDUCE_FAILS, warn=said.append)
    assert found.keys() == SPARSECORE.keys() - {ALL_REDUCE} | {"other"}
    assert said == [f"the compiler failed, compiled again without all-reduces on SparseCores: {reason}"]
    assert built(own, ALL_FAIL, warn=said.append) == {"xla_tpu_scoped_vmem_limit_kib": "1024", "other": True}
    assert said[1:] == [said[0], f"the compiler failed, compiled again with engine.overlap=none: {reason}"]
    with pytest.raises(RecipeError, match="the compiler failed: INTERNAL"):
        built(ShardMap(overlap="sparsecore"), ALL_REDUCE_FAILS)
    with pytest.raises(RecipeError, match="one operation of the step exceeds") as refused:  # with "none" as well
        built(ShardMap(), TOO_LARGE, warn=said.append)
    assert refused.value.hint == "try engine.xla={xla_tpu_scoped_vmem_limit_kib: 65536}"
    assert said[3].startswith("the compiler failed, compiled again with engine.overlap=none: RESOURCE_EXHAUSTED")
