"""The config.json of published classifiers of images, of transformers and of timm, both ways."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.core.errors import DataError, FieldError
from dtrain.core.files import read_object
from dtrain.core.types import JsonObject
from dtrain.models.hf_config import GPT2_ACTIVATIONS, IGNORED, Fields, Published
from dtrain.models.resnet import WIDER, ResNet
from dtrain.models.settings import settings
from dtrain.models.vit import ViT

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
DEFAULTS: dict[str, JsonObject] = {
    "vit": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3,
        "qkv_bias": True,
    },
    "resnet": {
        "num_channels": 3, "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
}  # fmt: skip
"""The defaults of transformers."""
HARMLESS = IGNORED | {
    "encoder_stride", "pooler_act", "pooler_output_size", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "out_features", "out_indices", "stage_names", "num_labels", "label_names", "label_descriptions", "num_features",
    "pretrained_cfg",
}  # fmt: skip
"""Fields about training, other parts and names of classes; the last one is read by `normalisation`."""
VITS = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
"""Width, layers and heads of the sizes of timm."""
TIMM_VIT = re.compile(rf"(vit|deit)_({'|'.join(VITS)})_patch(\d+)_(\d+)")
TIMM_RESNET = re.compile(r"(tv_)?resnet(18|34|50|101|152)")
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
BOTTLENECK = 50
"""From how many layers on blocks are bottlenecks."""
TIMM_ARGS = {"img_size": "image", "patch_size": "patch", "embed_dim": "width", "depth": "layers", "num_heads": "heads"}
"""Arguments of timm's vision transformers, and ours."""


def is_of_images(config: JsonObject) -> bool:
    """Whether it describes a classifier of images."""
    return config.get("model_type") in DEFAULTS or "architecture" in config


def image_model(config: JsonObject, path: Path) -> Published:
    """The classifier of a config.json. DataError if it is not supported, or has an impossible value."""
    timm = "architecture" in config
    fields = Fields(config, {} if timm else DEFAULTS[config["model_type"]], path)
    try:
        model = _of_timm(fields) if timm else _vit(fields) if config["model_type"] == "vit" else _resnet(fields)
    except (FieldError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"{path} does not describe a model of images: {type(error).__name__} {error}") from error
    unchecked = tuple(sorted(config.keys() - fields.known - HARMLESS))
    name = f"architecture: {config['architecture']}" if timm else f"model_type: {config['model_type']}"
    return Published(
        model, dict.fromkeys(settings(model), name) | fields.sources, tuple(fields.unserved), unchecked, None
    )


def _classes(config: JsonObject) -> int:
    return int(config.get("num_labels") or len(config.get("id2label") or (0, 1)))


def _vit(fields: Fields) -> ViT:
    act, side = fields("hidden_act", "activation"), fields("image_size")
    if act not in GPT2_ACTIVATIONS:
        fields.refuse(f"hidden_act: {act}")
    height, width = side if isinstance(side, list) else (side, side)
    if not fields("qkv_bias", "bias"):
        fields.refuse("qkv_bias: False")
    return ViT(
        image=(height, width, fields("num_channels")),
        classes=_classes(fields.values),
        patch=fields("patch_size", "patch"),
        layers=fields("num_hidden_layers", "layers"),
        width=fields("hidden_size", "width"),
        heads=fields("num_attention_heads", "heads"),
        hidden=fields("intermediate_size", "hidden"),
        pool="token",
        bias=True,
        activation="gelu_tanh" if GPT2_ACTIVATIONS.get(act) == "gelu_tanh" else "gelu",
        epsilon=fields("layer_norm_eps", "epsilon"),
    )


def _resnet(fields: Fields) -> ResNet:
    for name in ("downsample_in_first_stage", "downsample_in_bottleneck"):
        if fields(name):
            fields.refuse(f"{name}: True")
    if fields("hidden_act") != "relu":
        fields.refuse(f"hidden_act: {fields('hidden_act')}")
    bottleneck = fields("layer_type", "bottleneck") == "bottleneck"
    return ResNet(
        image=(DEFAULTS["vit"]["image_size"],) * 2 + (fields("num_channels"),),  # of any size; config.json has none
        classes=_classes(fields.values),
        stages=tuple(size // WIDER if bottleneck else size for size in fields("hidden_sizes", "stages")),
        blocks=tuple(fields("depths", "blocks")),
        stem=fields("embedding_size", "stem"),
        bottleneck=bottleneck,
    )


def _of_timm(fields: Fields) -> ViT | ResNet:
    fields.known |= {"architecture", "num_classes", "global_pool", "model_args"}
    name, arguments = str(fields.values["architecture"]), dict(fields.values.get("model_args") or {})
    pretrained = fields.values.get("pretrained_cfg") or {}
    plain, pool = name.partition(".")[0], arguments.pop("global_pool", fields.values.get("global_pool"))
    classes = int(arguments.pop("num_classes", None) or fields.values.get("num_classes") or pretrained["num_classes"])
    channels, height, width = pretrained.get("input_size") or (3, 224, 224)
    channels = arguments.pop("in_chans", channels)
    if match := TIMM_VIT.fullmatch(plain):
        size, layers, heads = VITS[match[2]]
        own = {"image": int(match[4]), "patch": int(match[3]), "width": size, "layers": layers, "heads": heads}
        own |= {TIMM_ARGS[key]: arguments.pop(key) for key in list(arguments) if key in TIMM_ARGS}
        side: Any = own.pop("image")
        height, width = side if isinstance(side, list) else (side, side)
        ratio = arguments.pop("mlp_ratio", 4.0)
        fixed: Any = {"pool": "token", "bias": True, "activation": "gelu", "epsilon": 1e-6}
        hidden = int(own["width"] * ratio)
        model = ViT(image=(height, width, channels), classes=classes, hidden=hidden, **own, **fixed)
    elif match := TIMM_RESNET.fullmatch(plain):
        depth = int(match[2])
        blocks = tuple(arguments.pop("layers", BLOCKS[depth]))
        image = (height, width, channels)
        model = ResNet(image=image, classes=classes, blocks=blocks, bottleneck=depth >= BOTTLENECK)
    else:
        message = f"{fields.path}: dtrain does not support timm's architecture {name}"
        raise DataError(
            message, "supported: vit_SIZE_patchP_PIXELS, deit_SIZE_patchP_PIXELS, resnet18, 34, 50, 101, 152"
        )
    usual = "token" if isinstance(model, ViT) else "avg"
    if pool not in (None, usual):
        fields.refuse(f"global_pool: {pool}")
    for key, value in arguments.items():
        if value is not None:
            fields.refuse(f"model_args.{key}: {value}")
    return model


class Normalisation(NamedTuple):
    """What was subtracted from the pixels, scaled to 0..1, and what they were divided by, for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        return f"mean {list(self.mean)}, std {list(self.std)}"


def normalisation(source: Path) -> Normalisation | None:
    """That of the pictures that published parameters were trained on: from timm's config.json, or from
    preprocessor_config.json; None if neither has it. DataError if it is damaged."""
    folder = source if source.is_dir() else source.parent
    about: JsonObject = {}
    mean = std = None
    if (folder / PREPROCESSOR).is_file():
        about = read_object(folder / PREPROCESSOR)
        mean, std = (about.get(key) if about.get("do_normalize", True) else None for key in ("image_mean", "image_std"))
    elif (folder / CONFIG).is_file():
        about = read_object(folder / CONFIG).get("pretrained_cfg") or {}
        mean, std = about.get("mean"), about.get("std")
    if mean is None or std is None:
        return None
    try:
        return Normalisation(tuple(map(float, mean)), tuple(map(float, std)))
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder}: mean and deviation of the pixels are no numbers: {mean!r}, {std!r}") from error


def side(source: Path) -> tuple[int, int] | None:
    """Height and width of the pictures in preprocessor_config.json; None if it does not say them."""
    path = source / PREPROCESSOR
    about = read_object(path) if path.is_file() else {}
    size = about.get("crop_size") if about.get("do_center_crop") else None
    size = about.get("size") if size is None else size
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    found = (size, size) if isinstance(size, int) else size
    match found:
        case (int(height), int(width)) if min(height, width) > 0:
            return height, width
    return None


def image_files(
    model: ViT | ResNet, library: str, classes: Sequence[str], pixels: Normalisation
) -> dict[str, JsonObject] | None:
    """The files beside the parameters with which that library computes the same, by name; None if it cannot.

    What is written is read back, and must give this model.
    """
    if len(classes) != model.classes:
        classes = [f"class {number}" for number in range(model.classes)]
    config = _config_of_timm(model, classes, pixels) if library == "timm" else _config_of_transformers(model, classes)
    try:
        read = image_model(json.loads(json.dumps(config)), Path(CONFIG))
    except DataError:  # of other sizes than that library's
        return None
    sized = read.model.image == model.image or isinstance(model, ResNet)  # whose config.json has no size of pictures
    if read.unserved or not sized or settings(read.model) != settings(model) or read.model.classes != model.classes:
        return None
    if library == "timm":
        return {CONFIG: config}
    assert model.image
    height, width, _ = model.image
    preprocessor = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": height, "width": width},
        "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(pixels.mean), "image_std": list(pixels.std),
    }  # fmt: skip
    return {CONFIG: config, PREPROCESSOR: preprocessor}


def _config_of_transformers(model: ViT | ResNet, classes: Sequence[str]) -> JsonObject:
    assert model.image
    height, width, channels = model.image
    names: JsonObject = {
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "num_channels": channels,
    }
    if isinstance(model, ViT):
        acts = {form: name for name, form in GPT2_ACTIVATIONS.items()}
        return names | {
            "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": model.width,
            "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "intermediate_size": model.hidden,
            "hidden_act": acts[model.activation], "layer_norm_eps": model.epsilon, "patch_size": model.patch,
            "image_size": height if height == width else [height, width], "qkv_bias": model.bias,
        }  # fmt: skip
    sizes = [size * (WIDER if model.bottleneck else 1) for size in model.stages]
    return names | {
        "architectures": ["ResNetForImageClassification"], "model_type": "resnet", "embedding_size": model.stem,
        "hidden_sizes": sizes, "depths": list(model.counts), "hidden_act": "relu",
        "layer_type": "bottleneck" if model.bottleneck else "basic",
    }  # fmt: skip


def _config_of_timm(model: ViT | ResNet, classes: Sequence[str], pixels: Normalisation) -> JsonObject:
    assert model.image
    height, width, channels = model.image
    about: JsonObject = {
        "input_size": [channels, height, width], "mean": list(pixels.mean), "std": list(pixels.std),
        "num_classes": model.classes, "interpolation": "bicubic", "crop_pct": 1.0,
    }  # fmt: skip
    config: JsonObject = {"num_classes": model.classes, "label_names": list(classes)}
    if isinstance(model, ViT):
        size = next((name for name, own in VITS.items() if own == (model.width, model.layers, model.heads)), "tiny")
        name = f"vit_{size}_patch{model.patch}_{height}"
        ratio = model.hidden / model.width
        arguments = {key: getattr(model, ours) for key, ours in TIMM_ARGS.items() if ours != "image"}
        arguments |= {"img_size": height, "mlp_ratio": ratio}
        about |= {"first_conv": "patch_embed.proj", "classifier": "head"}
        return config | {"architecture": name, "global_pool": "token", "model_args": arguments, "pretrained_cfg": about}
    depth = next((depth for depth, blocks in BLOCKS.items() if blocks == model.counts), 18)
    depth = BOTTLENECK if model.bottleneck and depth < BOTTLENECK else depth
    about |= {"first_conv": "conv1", "classifier": "fc"}
    arguments = {"layers": list(model.counts)}
    return config | {"architecture": f"resnet{depth}", "global_pool": "avg", "model_args": arguments,
                     "pretrained_cfg": about}  # fmt: skip
