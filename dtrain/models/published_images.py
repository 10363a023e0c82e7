"""The names of the parameters of classifiers of images in the files of timm and of transformers, one table a family."""

from collections.abc import Sequence

from dtrain.models.place import Naming, Place, Reordered, kernel

KINDS = ("weight", "bias")
NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}
"""The parts of a batch normalisation, and their names in PyTorch."""


def vit_names(patch: int, width: int, tokens: int) -> tuple[Naming, ...]:
    """Of vision transformers; the last naming is that of files without a head, which lack the prefix `vit.`."""

    def ends(token: str, position: str, patches: str, norm: str, head: str) -> dict[str, Place]:
        pixels = (patch, patch, -1, width)  # -1: the channels
        return {
            "token": Reordered(token, split=(1, 1, width), axes=(0, 1, 2)),
            "position": Reordered(position, split=(1, tokens, width), axes=(0, 1, 2)),
            "embed.weight": Reordered(f"{patches}.weight", split=pixels, axes=(3, 2, 0, 1)),
            "embed.bias": Place(f"{patches}.bias"),
            **{f"norm.{ours}": Place(f"{norm}.{NORM[ours]}") for ours in ("scale", "bias")},
            "head.weight": Place(f"{head}.weight", transposed=True),
            "head.bias": Place(f"{head}.bias"),
        }

    def blocks(layer: str, names: dict[str, str]) -> dict[str, Place]:
        found = {}
        for ours, theirs in names.items():
            norm = ours.startswith("norm")
            weight = "scale" if norm else "weight"
            found[f"blocks.{ours}.{weight}"] = Place(f"{layer}.{theirs}.weight", transposed=not norm)
            found[f"blocks.{ours}.bias"] = Place(f"{layer}.{theirs}.bias")
        return found

    timm = ends("cls_token", "pos_embed", "patch_embed.proj", "norm", "head")
    parts = {"norm1": "norm1", "out": "attn.proj", "norm2": "norm2", "up": "mlp.fc1", "down": "mlp.fc2"}
    timm |= blocks("blocks.{layer}", parts)
    for number, ours in enumerate(("query", "key", "value")):
        start, total = number * width, 3 * width
        timm[f"blocks.{ours}.weight"] = Place("blocks.{layer}.attn.qkv.weight", True, start, total)
        timm[f"blocks.{ours}.bias"] = Place("blocks.{layer}.attn.qkv.bias", False, start, total)
    names = {
        "norm1": "layernorm_before",
        **{ours: f"attention.attention.{ours}" for ours in ("query", "key", "value")},
        "out": "attention.output.dense",
        "norm2": "layernorm_after",
        "up": "intermediate.dense",
        "down": "output.dense",
    }

    def transformers(prefix: str) -> Naming:
        inputs = f"{prefix}embeddings"
        token, position, patches = f"{inputs}.cls_token", f"{inputs}.position_embeddings", f"{inputs}.patch_embeddings"
        own = ends(token, position, f"{patches}.projection", f"{prefix}layernorm", "classifier")
        return Naming("transformers", own | blocks(f"{prefix}encoder.layer.{{layer}}", names))

    return transformers("vit."), Naming("timm", timm), transformers("")


def resnet_names(blocks: Sequence[int], bottleneck: bool) -> tuple[Naming, ...]:
    """Of residual networks with so many blocks in each stage; the last naming is that of files without a head, which
    lack the prefix `resnet.`."""
    numbers = [(stage, block) for stage, count in enumerate(blocks) for block in range(count)]
    convolutions = (1, 2, 3) if bottleneck else (1, 2)
    timm = _unit("stem.conv", "stem.norm", "conv1", "bn1")
    for stage, block in numbers:
        name, theirs = f"stage{stage}_block{block}", f"layer{stage + 1}.{block}"
        for number in convolutions:
            timm |= _unit(
                f"{name}.conv{number}", f"{name}.norm{number}", f"{theirs}.conv{number}", f"{theirs}.bn{number}"
            )
        timm |= _unit(f"{name}.skip", f"{name}.skip_norm", f"{theirs}.downsample.0", f"{theirs}.downsample.1")
    timm |= {f"head.{what}": Place(f"fc.{what}", transposed=what == "weight") for what in KINDS}

    def transformers(prefix: str) -> Naming:
        names = _paired("stem.conv", "stem.norm", f"{prefix}embedder.embedder")
        for stage, block in numbers:
            name, theirs = f"stage{stage}_block{block}", f"{prefix}encoder.stages.{stage}.layers.{block}"
            for number in convolutions:
                names |= _paired(f"{name}.conv{number}", f"{name}.norm{number}", f"{theirs}.layer.{number - 1}")
            names |= _paired(f"{name}.skip", f"{name}.skip_norm", f"{theirs}.shortcut")
        head = {f"head.{what}": Place(f"classifier.1.{what}", transposed=what == "weight") for what in KINDS}
        return Naming("transformers", names | head)

    return transformers("resnet."), Naming("timm", timm), transformers("")


def _paired(conv: str, norm: str, theirs: str) -> dict[str, Place]:
    return _unit(conv, norm, f"{theirs}.convolution", f"{theirs}.normalization")


def _unit(conv: str, norm: str, their_conv: str, their_norm: str) -> dict[str, Place]:
    """A convolution and its normalisation."""
    parts = {f"{norm}.{ours}": Place(f"{their_norm}.{theirs}") for ours, theirs in NORM.items()}
    parts[f"{norm}.mean"] = Place(f"{their_norm}.running_mean", count=f"{their_norm}.num_batches_tracked")
    return {conv: kernel(f"{their_conv}.weight"), **parts}
