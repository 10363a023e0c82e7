"""A mixture of experts in place of a feed-forward layer (Shazeer et al. 2017; Fedus et al. 2021).

Dims: B batch, T tokens, E embed, X experts, K experts chosen by a token, N rows.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Gt, Le

from dtrain.core.errors import FieldError
from dtrain.core.metrics import DROPPED
from dtrain.core.types import Natural, NonNegative, Positive, PositiveFloat
from dtrain.models.feed_forward import Form, gated, hidden
from dtrain.models.nn import param as declare
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import bias, lift, scale
from dtrain.models.nn.low_rank import merged
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import Mixture
from dtrain.models.nn.moe import ExpertWeights, Product, Routing
from dtrain.models.nn.param import Init, Param, Tree
from dtrain.models.nn.vma import axes_of, vary


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Each token is routed to `active` of `count` experts, and to all `shared` ones."""

    count: Annotated[int, Gt(0), Le(2**20)]
    """Number of experts of each layer."""
    active: Annotated[int, Gt(0), Le(1024)]
    """Experts that each token is routed to."""
    hidden: Positive
    """Hidden width of one expert."""
    shared: Natural = 0
    """Experts that every token is routed to."""
    shared_hidden: Positive | None = None
    """Hidden width of the shared experts together; default: shared x hidden."""
    shared_gate: bool = False
    """Multiply the result of the shared experts by a sigmoid of the token (Qwen 2 MoE)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's values become gates."""
    renormalise: bool = True
    """Normalise the gates of a token to sum to one."""
    scale: PositiveFloat = 1.0
    """Gates are multiplied by this."""
    balance: NonNegative = 0.01
    """Weight of each layer's load-balance loss, computed per row: 1 at an even load (DeepSeek-AI 2024,
    section 2.1.2). Hugging Face's `router_aux_loss_coef` c of a model with L layers corresponds to c x active / L."""
    z_loss: NonNegative = 0.0
    """Weight of the router's z-loss (Zoph et al. 2022)."""
    bias_rate: NonNegative = 0.0
    """Step size of a routing bias that balances the load without a loss (Wang et al. 2024); 0: no bias."""
    bias: bool = False
    """A routing bias also without `bias_rate`: it stays as it is, as a published model has it."""
    groups: Positive = 1
    """Groups of experts; a token is routed to experts of `active_groups` of them, by the sum of the `group_by` best
    scores of each (DeepSeek-AI 2024)."""
    active_groups: Positive = 1
    """Groups that a token is routed to."""
    group_by: Literal[1, 2] = 2
    """How many of a group's best scores rank it: 1 in DeepSeek V2."""
    biases: bool = False
    """Biases in the experts (gpt-oss)."""
    router_bias: bool = False
    """A bias of the router's values (gpt-oss), unlike `bias`, which does not change the gates."""
    beside: bool = False
    """Experts beside the feed-forward layer, whose results are normalised apart and added. The router reads what
    neither normalises, normalised and scaled by a vector, and each expert has a factor of its gates (Gemma 4)."""
    before: bool = False
    """Gates multiply the input of an expert, not its result (Llama 4)."""
    capacity: PositiveFloat | None = None
    """Most tokens of a row that one expert takes, as a multiple of an even spread: earlier tokens come first, the rest
    skip that expert, in training and evaluation, the same on every mesh. The metric `dropped` is their fraction. By
    default, and always when generating, no token is dropped."""

    def __post_init__(self) -> None:
        if self.active > self.count:
            message = f"active = {self.active} experts is more than count = {self.count}"
            raise FieldError("active", message, f"use at most {self.count}")
        if self.count % self.groups:
            raise FieldError("groups", f"groups = {self.groups} does not divide count = {self.count}")
        if self.active_groups > self.groups:
            raise FieldError(
                "active_groups", f"active_groups = {self.active_groups} is more than groups = {self.groups}"
            )
        if self.active > (most := self.active_groups * self.count // self.groups):
            message = f"active_groups = {self.active_groups} have {most} experts, fewer than active = {self.active}"
            raise FieldError("active_groups", message)
        if self.group_by != 2 and self.groups == 1:
            raise FieldError(
                "group_by", "group_by ranks groups of experts, and there is one", "set groups, or leave it out"
            )
        if self.before and self.biases:
            raise FieldError("before", "before and biases exclude each other")
        if self.shared_hidden and not self.shared:
            raise FieldError("shared_hidden", "shared_hidden: there are no shared experts")
        if self.shared_gate and not self.shared:
            raise FieldError("shared_gate", "shared_gate: there are no shared experts")
        if self.active == 1 < self.count and self.renormalise:
            message = "with one active expert every gate is 1, so that the loss does not train the router"
            raise FieldError("renormalise", message, "renormalise: false, as in Switch Transformer, or active: 2")

    @property
    def mixture(self) -> Mixture:
        """What plans ask about it."""
        return Mixture(count=self.count, active=self.active, capacity=self.capacity)

    def params(self, width: int, form: Form, inner: Init, outer: Init) -> Tree:
        """Router, experts and shared experts. `inner` and `outer` initialise the first and the last matrices."""
        tree: Tree = {
            "router": Param((width, self.count), "embed _", inner, fan_in=("embed",), exact=True),
            "experts": matrices(width, self.hidden, form, inner=inner, outer=outer, count=self.count),
        }
        if self.biases:
            size = self.hidden
            tree["experts"] |= {f"{name}_bias": bias((self.count, size), "experts hidden")
                                for name in tree["experts"] if name != "down"}  # fmt: skip
            tree["down_bias"] = bias((self.count, width), "_ embed")
        if self.router_bias:
            tree["router_bias"] = Param((self.count,), "_", declare.zeros, decay=False, exact=True)
        if self.beside:
            tree["router_scale"] = replace(scale((width,), "embed"), exact=True)
            tree["expert_scale"] = replace(scale((self.count,), "_"), exact=True)
        if self.biased:
            tree["bias"] = Param((self.count,), "_", declare.zeros, decay=False, rate=self.bias_rate, exact=True)
        if self.shared:
            tree["shared"] = matrices(width, self.shared_size, form, inner, outer)
        if self.shared_gate:
            tree["shared_gate"] = Param((width, 1), "embed _", inner, fan_in=("embed",))
        return tree

    def apply(
        self, params: Tree, x_BTE: jax.Array, weight_BT: jax.Array, form: Form, ctx: Context,
        routed_BTE: jax.Array | None = None,
    ) -> tuple[jax.Array, Tree]:  # fmt: skip
        """x (B, T, E), split by `tokens`, through the experts. `routed_BTE`: what the router reads, by default x.

        Returns this device's share of the output, not yet summed over `hidden`, with all tokens of `length`, and the
        sums over tokens: `router`, which is added to the loss, and `dropped`.
        """
        weight_BT, limit = ctx.share(weight_BT), None
        chosen_BTK, gates_BTK, sums = self._route(params, x_BTE if routed_BTE is None else routed_BTE, weight_BT, ctx)
        if self.capacity is not None:
            kept_BTK, limit = self._kept(chosen_BTK, self.capacity, ctx)
            chosen_BTK = jnp.where(kept_BTK, chosen_BTK, self.count)  # no expert has the number `count`
            sums[DROPPED.name] = ctx.reduce(((~kept_BTK).mean(-1, dtype=jnp.float32) * weight_BT).sum(), "kept")
        tokens = Routing(*(ctx.collect(part) for part in (x_BTE, chosen_BTK, gates_BTK)))

        # The gates multiply the rows before the last matrix, so that its result is not needed for their gradient.
        def products(experts: Tree, rows_NE: jax.Array, gates_N1: jax.Array, times: Product) -> jax.Array:
            rows_NE = rows_NE * gates_N1 if self.before else rows_NE
            y_NF = hidden(form, lambda name: times(rows_NE, experts[name], name, experts.get(f"{name}_bias")))
            y_NF = y_NF if self.before else y_NF * gates_N1
            return times(y_NF, experts["down"], "down")

        dims = dict.fromkeys(("gate", "up"), "experts embed hidden") | {"down": "experts hidden embed"}
        dims = {name: dims.get(name, "experts hidden") for name in params["experts"]}
        experts = merged(params["experts"])  # products with experts take arrays
        out_BTE = ctx.dispatch(tokens, ExpertWeights(experts, dims, products, most=limit))
        if self.biases:
            out_BTE = out_BTE + self._down_biases(params, tokens, ctx)
        if self.shared:
            shared = params["shared"]
            y_BTF = hidden(form, lambda name: matmul(tokens.x, shared[name], name=name))
            y_BTE = matmul(y_BTF, shared["down"], name="down")
            if self.shared_gate:
                y_BTE = y_BTE * jax.nn.sigmoid(matmul(tokens.x, params["shared_gate"], narrow=False))
            out_BTE = out_BTE + y_BTE
        return out_BTE, sums

    def _down_biases(self, params: Tree, tokens: Routing, ctx: Context) -> jax.Array:
        """The biases of the experts' last products, weighted by the gates: on the first share of `hidden` alone, since
        the shares are summed."""
        weights_BTX = (jax.nn.one_hot(tokens.chosen, self.count) * tokens.gates[..., None]).sum(2)
        out_BTE = matmul(weights_BTX.astype(tokens.x.dtype), params["down_bias"], narrow=False)
        first = ctx.first("hidden", params["experts"]["up"].shape[-1])
        return jnp.where(first == 0, out_BTE, 0)

    def _route(
        self, params: Tree, x_BTE: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """Each token's experts and gates, and the router's losses as sums over tokens."""
        # rounding may change which experts are chosen: always in float32, whatever dtype the layers compute in
        wide_BTE, router_EX = (x.astype(jnp.float32) for x in (x_BTE, params["router"]))
        if self.beside:
            wide_BTE = wide_BTE * lift(params["router_scale"].astype(jnp.float32), wide_BTE) * x_BTE.shape[-1] ** -0.5
        logits_BTX = jnp.einsum("BTE,EX->BTX", wide_BTE, router_EX, precision=jax.lax.Precision.HIGHEST)
        if self.router_bias:
            logits_BTX = logits_BTX + params["router_bias"].astype(jnp.float32)[None, None]
        scores_BTX = jax.nn.softmax(logits_BTX) if self.score == "softmax" else jax.nn.sigmoid(logits_BTX)
        ranked_BTX = scores_BTX + (params["bias"].astype(jnp.float32)[None, None] if self.biased else 0)
        ranked_BTX = self._in_groups(ranked_BTX) if self.groups > 1 else ranked_BTX
        # not top_k: on a CPU, under jit, the compiler would gather its operand over all devices
        order_BTX = jnp.argsort(jax.lax.stop_gradient(ranked_BTX), descending=True, stable=True)
        order_BTX = vary(order_BTX, axes_of(ranked_BTX))  # JAX gives the result of a sort the type of a replicated one
        chosen_BTK = order_BTX[..., : self.active]
        gates_BTK = jnp.take_along_axis(scores_BTX, chosen_BTK, axis=-1)
        if self.renormalise:
            gates_BTK = gates_BTK / jnp.maximum(gates_BTK.sum(-1, keepdims=True), 1e-20)
        if self.beside:
            gates_BTK = gates_BTK * params["expert_scale"].astype(jnp.float32)[chosen_BTK]
        hits_BTX = jax.nn.one_hot(chosen_BTK, self.count, dtype=jnp.float32).sum(2) * weight_BT[..., None]
        loss = self.balance * self._imbalance(scores_BTX, hits_BTX, weight_BT, ctx)
        loss += self.z_loss * (jnp.square(jax.nn.logsumexp(logits_BTX, -1)) * weight_BT).sum()
        sums = {"router": ctx.reduce(loss, "kept")}
        if self.bias_rate:
            sums["router"] += self._pressure(params["bias"], ctx.reduce(hits_BTX.sum((0, 1)), "kept"))
        return chosen_BTK, (gates_BTK * self.scale).astype(x_BTE.dtype), sums

    @property
    def shared_size(self) -> int:
        """Hidden width of the shared experts together."""
        return self.shared_hidden or self.shared * self.hidden

    @property
    def biased(self) -> bool:
        """Whether there is a routing bias."""
        return self.bias or self.bias_rate > 0

    def _in_groups(self, ranked_BTX: jax.Array) -> jax.Array:
        """The ranks, with those of experts outside the best groups below all others."""
        split_BTGN = jax.lax.stop_gradient(ranked_BTX).reshape(*ranked_BTX.shape[:2], self.groups, -1)
        best_BTG = jnp.sort(split_BTGN, -1)[..., -self.group_by :].sum(-1)
        order_BTG = jnp.argsort(jnp.argsort(best_BTG, descending=True, stable=True), -1)  # 0 for the best group
        open_BTX = jnp.repeat(order_BTG < self.active_groups, self.count // self.groups, -1)
        return jnp.where(open_BTX, ranked_BTX, -jnp.inf)

    def _kept(self, chosen_BTK: jax.Array, capacity: float, ctx: Context) -> tuple[jax.Array, int]:
        """Which choices are within their expert's capacity (B, T, K), and that capacity.

        Decided on full rows, so that the result does not depend on how the mesh splits them.
        """
        row_BTK = ctx.whole_row(chosen_BTK)
        limit = math.ceil(capacity * row_BTK.shape[1] * self.active / self.count)
        onto_BNX = jax.nn.one_hot(row_BTK.reshape(len(row_BTK), -1), self.count, dtype=jnp.int32)
        # N runs over tokens and their choices; the place of a choice in the queue of its expert counts from 1
        place_BN = (jnp.cumsum(onto_BNX, 1) * onto_BNX).sum(-1)
        return ctx.part_of_row((place_BN <= limit).reshape(row_BTK.shape)), limit

    def _imbalance(self, scores_BTX: jax.Array, hits_BTX: jax.Array, weight_BT: jax.Array, ctx: Context) -> jax.Array:
        """The load-balance loss (Fedus et al. 2021, section 2.2), per row (DeepSeek-AI 2024, section 2.1.2).

        Summed over tokens: one for each token at an even load, more at an uneven one. Computed per row, not over the
        batch, it is a sum over examples and does not depend on how the mesh splits the batch.
        """
        tokens_B = ctx.reduce(weight_BT.sum(1), "tokens")
        share_BX = ctx.reduce(hits_BTX.sum(1), "tokens") / jnp.maximum(tokens_B, 1)[:, None]
        chance_BTX = scores_BTX / scores_BTX.sum(-1, keepdims=True)
        chance_BX = (chance_BTX * weight_BT[..., None]).sum(1)
        return self.count / self.active * (jax.lax.stop_gradient(share_BX) * chance_BX).sum()

    def _pressure(self, bias_X: jax.Array, hits_X: jax.Array) -> jax.Array:
        """Zero, with each expert's excess of tokens as the gradient of its bias.

        The optimizer steps the bias against the sign of this gradient (Wang et al. 2024, algorithm 1).
        """
        excess_X = jax.lax.stop_gradient(hits_X - hits_X.mean())
        pull = (bias_X.astype(jnp.float32) * excess_X).sum()
        return pull - jax.lax.stop_gradient(pull)


def matrices(width: int, size: int, form: Form, inner: Init, outer: Init, count: int | None = None) -> Tree:
    """The matrices of a feed-forward layer; with `count`, of that many experts, stacked."""
    many, dim = ((), "") if count is None else ((count,), "experts ")
    up = Param((*many, width, size), f"{dim}embed hidden", inner, fan_in=("embed",))
    down = Param((*many, size, width), f"{dim}hidden embed", outer, fan_in=("hidden",))
    return {"up": up, "down": down} | ({"gate": up} if gated(form) else {})
