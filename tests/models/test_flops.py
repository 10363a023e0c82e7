"""FLOPs of a training step, counted in the gradient of what is trained."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dtrain.data.batch import Feature
from dtrain.models.altup import AltUp
from dtrain.models.cnn import CNN
from dtrain.models.decoder import Decoder
from dtrain.models.lora import Adapted, Lora
from dtrain.models.mlp import MLP
from dtrain.models.nn.context import Context
from dtrain.models.nn.count_flops import gradient_flops
from dtrain.models.nn.layers import dense
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree
from dtrain.optim.groups import Group, grouped

IMAGE = {"image": Feature((64,), "float32"), "label": Feature((), "int32")}
PIXELS = {"image": Feature((8, 8, 1), "float32"), "label": Feature((), "int32")}
TOKENS = {"token": Feature((32,), "int32"), "target": Feature((32,), "int32")}
DECODER = Decoder(vocab=64, context=32, layers=2, width=16, heads=2, hidden=48)


def frozen(declared: Tree, *patterns: str) -> Tree:
    return grouped(declared, tuple(Group(match=pattern, frozen=True) for pattern in patterns))


@dataclass(frozen=True)
class TwoParts:
    """An encoder and a decoder of 64 x 64, and a critic of 64 x 64 that only training uses, behind a stop_gradient."""

    recompute: bool = False

    def params(self) -> Tree:
        return {name: dense(64, 64, "_ _") for name in ("encoder", "decoder", "critic")}

    def loss(self, params: Tree, batch: Any, ctx: Context) -> Loss:
        encode = lambda x: jnp.tanh(x @ params["encoder"]["weight"])  # noqa: E731
        hidden = (jax.checkpoint(encode) if self.recompute else encode)(batch["image"])
        drawn = hidden @ params["decoder"]["weight"]
        loss = jnp.square(drawn - batch["image"]).sum()
        if ctx.train:
            loss += jnp.square(jax.lax.stop_gradient(drawn) @ params["critic"]["weight"]).sum()
        return Loss(loss, jnp.float32(len(drawn)), {})


ONE = 2 * 64 * 64


def test_the_gradient_of_the_training_loss_is_counted() -> None:
    model = TwoParts()
    # encoder: forward and weights; decoder: forward, weights, inputs; critic: forward and weights
    assert gradient_flops(model, IMAGE, 10, model.params()) == (
        (2 + 3 + 2) * ONE * 10,
        "matrix products of the gradient",
    )
    again = gradient_flops(TwoParts(recompute=True), IMAGE, 10, model.params())
    assert again.convention == "matrix products of the gradient, recomputed ones included"


def test_gradients_of_frozen_parameters_are_not_counted() -> None:
    model = TwoParts()
    part = lambda *patterns: gradient_flops(model, IMAGE, 1, frozen(model.params(), *patterns)).step / ONE  # noqa: E731
    assert part("encoder.*") == 1 + 2 + 2  # and no gradient passes the decoder
    assert part("decoder.*") == 2 + 2 + 2
    assert part("encoder.*", "decoder.*") == 1 + 1 + 2


def test_a_classifier_with_frozen_layers() -> None:
    model = MLP(sizes=(64, 32, 10))
    whole, first, second = 3 * 2 * (64 * 32 + 32 * 10), 2 * 64 * 32, 2 * 32 * 10
    assert model.flops(IMAGE, 7, model.params()).step == 7 * whole
    assert model.flops(IMAGE, 7, frozen(model.params(), "layer0.*")).step == 7 * (first + 2 * second)
    assert model.flops(IMAGE, 7, frozen(model.params(), "layer1.*")).step == 7 * (2 * first + 2 * second)


def test_the_closed_form_of_a_cnn_counts_what_its_gradient_does_but_for_padding_and_the_first_layer() -> None:
    model = CNN(image=(8, 8, 1), classes=10, stages=(8, 16), group=4)
    closed, counted = (
        model.flops(PIXELS, 1, model.params()).step,
        gradient_flops(model, PIXELS, 1, model.params()).step,
    )
    assert 0.7 * closed < counted < closed


def test_adapters_cost_4n_of_the_base_and_6n_of_their_own() -> None:
    adapted = Adapted(DECODER, Lora(rank=4, targets=("blocks.query*", "blocks.mlp.*")))
    full = DECODER.flops(TOKENS, 3, DECODER.params())
    found = adapted.flops(TOKENS, 3, adapted.params())
    base, lora = adapted.params()["base"], adapted.params()["lora"]
    size = lambda tree: sum(param.size for param in jax.tree.leaves(tree))  # noqa: E731
    products = size({name: base[name] for name in ("blocks", "norm")}) + DECODER.vocab * DECODER.width
    assert found.step == pytest.approx(full.step + 3 * 32 * (6 * size(lora) - 2 * products))
    assert found.convention == "4N of frozen and 6N of trained parameters and causal attention"
    assert full.convention == "6N and causal attention"


def test_a_decoder_whose_head_alone_is_trained() -> None:
    untied = replace(DECODER, tied=False)
    declared = frozen(untied.params(), "blocks.*", "norm*", "embed")
    whole, head = untied.flops(TOKENS, 1, untied.params()).step, untied.flops(TOKENS, 1, declared).step
    products = sum(param.size for param in jax.tree.leaves({n: untied.params()[n] for n in ("blocks", "norm")}))
    assert whole - head == pytest.approx(2 * 32 * products)


def test_adapters_of_another_model_are_counted_in_its_gradient() -> None:
    adapted = Adapted(MLP(sizes=(64, 32, 10)), Lora(rank=2, targets=("layer0.weight",)))
    found = adapted.flops(IMAGE, 1, adapted.params())
    base = 2 * (64 * 32 + 32 * 10) + 2 * 32 * 10  # forward, and the inputs of the last layer
    assert base < found.step < base + 5 * 2 * 2 * (64 + 32)


def test_tables_of_layers_are_not_products() -> None:
    """Inputs of each layer add three matrices of width x inputs, and two scales, to each."""
    plain, own = DECODER, replace(DECODER, layer_inputs=8)
    found, before = (model.flops(TOKENS, 1, model.params()).step for model in (own, plain))
    assert found - before == 6 * DECODER.layers * (3 * 16 * 8 + 16) * 32


def test_matrices_of_streams_are_products() -> None:
    """Of three streams two matrices before and two after all layers, and in each layer a router and two small ones."""
    plain, own = DECODER, replace(DECODER, altup=AltUp(streams=3), laurel_rank=5)
    found, before = (model.flops(TOKENS, 1, model.params()).step for model in (own, plain))
    width, layer = 16, 16 * 3 + 3 * 9 + 3 * 3 + 16 + 2 * 16 * 5 + 16  # a scale of the router's input and of LAuReL's
    assert found - before == 6 * (4 * width**2 + DECODER.layers * layer) * 32
