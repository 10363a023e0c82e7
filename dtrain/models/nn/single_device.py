"""The verbs of `Context` on one device, and the loop over layers that all contexts share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.attention import AttentionSpec, Positions, attention
from dtrain.models.nn.context import LATER, Block, Context, Layers
from dtrain.models.nn.examples import ExampleVerbs
from dtrain.models.nn.moe import ExpertWeights, Routing, grouped
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION, INPUT, Policy, Remat, policy

LayerLoop = Callable[[bool, jax.Array, Tree], tuple[jax.Array, Tree]]
"""(whether it is in the body of a loop, activations, parameters of one iteration) → activations, sums."""


@dataclass(frozen=True)
class SingleDeviceContext(ExampleVerbs):
    """The verbs on one device: nothing is split."""

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return x

    def gather(self, params: Tree) -> Tree:
        return params

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        return x

    def largest(self, x: jax.Array, dim: str) -> jax.Array:
        return jax.lax.stop_gradient(x)

    def parts(self, dim: str) -> int:
        return 1

    def first(self, dim: str, size: int) -> jax.Array | int:
        return 0

    def lookup(self, table: Tree, token_BT: jax.Array, *, stacked: bool = False) -> jax.Array:
        return rows_of(table, token_BT, stacked=stacked)

    def places(self, length: int) -> jax.Array:
        return jnp.arange(length, dtype=jnp.int32)

    def share(self, x_BT: jax.Array) -> jax.Array:
        return x_BT

    def collect(self, x_BTE: jax.Array) -> jax.Array:
        return x_BTE

    def scatter(self, x_BTE: jax.Array, dim: str) -> jax.Array:
        return x_BTE

    def whole_row(self, x_BT: jax.Array) -> jax.Array:
        return x_BT

    def part_of_row(self, x_BT: jax.Array) -> jax.Array:
        return x_BT

    def attend(
        self,
        q_BTHD: jax.Array,
        k_BTGD: jax.Array,
        v_BTGD: jax.Array,
        spec: AttentionSpec,
        document_BT: jax.Array | None,
        sink_H: jax.Array | None = None,
    ) -> jax.Array:
        positions = Positions(self.places(q_BTHD.shape[1]), document_BT)
        return checkpoint_name(attention(q_BTHD, k_BTGD, v_BTGD, spec, positions, sink_H), ATTENTION)

    def stack(
        self, blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree = None, how: Layers = Layers()
    ) -> tuple[jax.Array, Tree]:
        return scan_layers(blocks, how.looked_up(params, shared, self), x, shared=shared, how=how, ctx=self)

    def dispatch(self, tokens: Routing, experts: ExpertWeights) -> jax.Array:
        return grouped(tokens, experts)


LANES = 128
"""TPUs fill the last dim of an array up to a multiple of so many values."""


def rows_of(table: jax.Array, token_BT: jax.Array, *, stacked: bool) -> jax.Array:
    """The row of each token: (B, T, columns) of a table (vocab, columns), (B, T, layers, columns) of stacked ones."""
    if not stacked:
        return table[token_BT]
    layers, words, columns = table.shape
    if columns % LANES == 0:
        return jax.vmap(lambda one: one[token_BT], out_axes=-2)(table)
    # rows are looked up in an array whose last dim is that of columns: a few of them are filled up least side by side
    beside = table.swapaxes(0, 1).reshape(words, layers * columns)
    return beside[token_BT].reshape(*token_BT.shape, layers, columns)


def scan_layers(
    blocks: Sequence[Block], params: Tree, x: jax.Array, shared: Tree, how: Layers, ctx: Context
) -> tuple[jax.Array, Tree]:
    """Scan over the layers and add their sums; one iteration applies each block once: of two, layers 2i and 2i + 1.

    Neighbours with the same block are a loop inside, and so are neighbours that follow each other in the same order
    again and again. Layers that remain after whole rounds are applied after them.
    """
    groups = how.groups or [""] * len(blocks)
    stacks = params if how.groups else {"": params}
    runs = [(*one, len(list(same))) for one, same in groupby(zip(blocks, groups, strict=True))]
    made = {
        (block, inside): rematerialised(block, how.remat, ctx, inside) for block in blocks for inside in (True, False)
    }
    rounds, rest = divmod(sum(map(_length, stacks.values())), len(blocks))
    used = {name: rounds * groups.count(name) for name in stacks}

    def one(block: Block, given: Tree, inside: bool, carry: jax.Array, layer: Tree) -> tuple[jax.Array, Tree]:
        return made[block, inside](layer, carry, given)

    def loop(apply: LayerLoop, inside: bool, carry: jax.Array, several: Tree) -> tuple[jax.Array, Tree]:
        """A scan, in whose body, or in that of a loop around it, `apply` is, unless it has only one iteration."""
        inside = inside or _length(several) > how.unroll
        body = partial(apply, inside)
        carry, sums = jax.lax.scan(body, carry, several, unroll=min(how.unroll, _length(several)))
        return carry, jax.tree.map(lambda s: s.sum(0), sums)

    def apply_runs(
        runs: Sequence[Run], given: Tree, inside: bool, carry: jax.Array, several: dict[str, Tree]
    ) -> tuple[jax.Array, Tree]:
        """The layers of one round, or the first of them."""
        found, first = list[Tree](), dict.fromkeys(several, 0)
        for part, times in repeated(runs):
            sizes = {name: times * sum(run[2] for run in part if run[1] == name) for name in several}
            if times > 1 and all(first[name] + size <= _length(several[name]) for name, size in sizes.items()):
                own = {name: _part(several[name], first[name], first[name] + n) for name, n in sizes.items() if n}
                own = jax.tree.map(lambda p, n=times: p.reshape(n, -1, *p.shape[1:]), own)
                carry, sums = loop(partial(apply_runs, part, given), inside, carry, own)
                first = {name: first[name] + size for name, size in sizes.items()}
                found.append(sums)
                continue
            for block, name, size in part * times:
                after = min(first[name] + size, _length(several[name]))
                if after > first[name]:
                    carry, sums = apply_run(block, given, inside, carry, _part(several[name], first[name], after))
                    given = (given or {}) | sums.pop(LATER) if LATER in sums else given
                    found.append(sums)
                first[name] = after
        return carry, _added(found)

    def apply_run(block: Block, given: Tree, inside: bool, carry: jax.Array, several: Tree) -> tuple[jax.Array, Tree]:
        if _length(several) == 1:
            return one(block, given, inside, carry, jax.tree.map(lambda p: p[0], several))
        return loop(partial(one, block, given), inside, carry, several)

    if len(runs) == 1:
        return loop(partial(one, blocks[0], shared), False, x, stacks[groups[0]])
    if rounds == 1 and not rest:
        return apply_runs(runs, shared, False, x, stacks)
    found = list[Tree]()
    if rounds:
        whole = {name: _part(stack, 0, used[name]) if rest else stack for name, stack in stacks.items()}
        whole = jax.tree.map(lambda p: p.reshape(rounds, -1, *p.shape[1:]), whole)
        x, sums = loop(partial(apply_runs, runs, shared), False, x, whole)
        found.append(sums)
    if rest:
        own = {name: _part(stack, used[name], _length(stack)) for name, stack in stacks.items()}
        x, sums = apply_runs(runs, shared, False, x, own)
        found.append(sums)
    return x, _added(found)


Run = tuple[Any, str, int]
"""A block, the group of its parameters, and how many neighbours it has with itself."""


def repeated(runs: Sequence[Run]) -> list[tuple[list[Run], int]]:
    """The runs in parts that follow each other so many times: at each place the longest such repetition."""
    found, start = list[tuple[list[Run], int]](), 0
    while start < len(runs):
        best = (1, 1)
        for size in range(1, (len(runs) - start) // 2 + 1):
            part, times = runs[start : start + size], 1
            while runs[start + times * size : start + (times + 1) * size] == part:
                times += 1
            if times > 1 and size * times > math.prod(best):
                best = (size, times)
        found.append((list(runs[start : start + best[0]]), best[1]))
        start += math.prod(best)
    return found


def _length(stacked: Tree) -> int:
    return len(jax.tree.leaves(stacked)[0])


def _part(stacked: Tree, first: int, after: int) -> Tree:
    return jax.tree.map(lambda p: p[first:after], stacked)


def _added(sums: Sequence[dict[str, jax.Array]]) -> Tree:
    """The sums of several layers, of which some have others."""
    return {
        name: sum(one[name] for one in sums if name in one) for name in dict.fromkeys(k for one in sums for k in one)
    }


def rematerialised(
    block: Block, remat: Remat | tuple[str, ...] | Policy, ctx: Context, inside: bool
) -> Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]:
    """The block in this context; the backward pass recomputes what `remat` does not save.

    `inside` the body of a loop both passes are apart. Elsewhere XLA would find that the backward pass computes what the
    forward pass has computed, and keep it.
    """

    def applied(layer: Tree, x: jax.Array, shared: Tree) -> tuple[jax.Array, Tree]:
        return block(layer, checkpoint_name(x, INPUT), shared, ctx)

    save_policy = remat if callable(remat) else policy(remat)
    return applied if save_policy is None else jax.checkpoint(applied, policy=save_policy, prevent_cse=not inside)
