"""What transformers and timm compute from classifiers of images, for tests/models/test_published_images.py.

make FOLDER              small random models of both libraries, each with its logits for the pictures in pictures.npy
logits FOLDER PICTURES   the logits of every model in the folder, which is opened with the library that it is of
pipeline MODEL FILE...   the probabilities that transformers gives to picture files, as JSON
"""

import json
import sys
from pathlib import Path

import numpy as np
import timm
import torch
from timm.models import save_for_hf
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

SIDE = 32
NORMAL = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "patch_size": 8}
RESNET = {"embedding_size": 8, "depths": [1, 2]}
MODELS = {
    "vit": lambda: ViTForImageClassification(ViTConfig(**VIT, image_size=SIDE, num_labels=5)),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(**RESNET, hidden_sizes=[8, 16], layer_type="basic", num_labels=5)
    ),
    "bottleneck": lambda: ResNetForImageClassification(
        ResNetConfig(**RESNET, hidden_sizes=[32, 64], layer_type="bottleneck", num_labels=5)
    ),
}
TIMM = {
    "timm-vit": ("vit_tiny_patch16_224", {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 2}),
    "timm-resnet": ("resnet18", {"layers": [1, 1, 2, 1]}),
    "timm-bottleneck": ("resnet50", {"layers": [1, 1, 1, 1]}),
}


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Values for biases, tokens and running statistics, which start as zeros and ones."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        starts_equal = value.ndim <= 1 or name.endswith(("cls_token", "pos_embed", "position_embeddings"))
        if starts_equal and value.is_floating_point():
            with torch.no_grad():
                value.copy_(torch.rand_like(value) * 0.5 + (0.75 if "var" in name else -0.25))
    return model.eval()


def make(folder: Path) -> None:
    torch.manual_seed(0)
    for name, build in MODELS.items():
        randomise(build()).save_pretrained(folder / name)
        ViTImageProcessor(size={"height": SIDE, "width": SIDE}, **NORMAL).save_pretrained(folder / name)
    for name, (architecture, arguments) in TIMM.items():
        model = randomise(timm.create_model(architecture, num_classes=5, **arguments))
        save_for_hf(model, folder / name, model_args=arguments, safe_serialization=True)
    pictures = np.random.default_rng(0).normal(size=(4, SIDE, SIDE, 3)).astype(np.float32)
    np.save(folder / "pictures.npy", pictures)
    logits(folder, folder / "pictures.npy")


def logits(folder: Path, pictures: Path) -> None:
    x = torch.tensor(np.load(pictures).transpose(0, 3, 1, 2))
    for config in sorted(folder.glob("*/config.json")):
        is_timm = "architecture" in json.loads(config.read_text())
        if is_timm:
            model = timm.create_model(f"local-dir:{config.parent}", pretrained=True).eval()
        else:
            model = AutoModelForImageClassification.from_pretrained(config.parent).eval()
        with torch.no_grad():
            found = model(x)
        np.save(config.with_name("logits.npy"), (found if is_timm else found.logits).numpy())


def pipeline(model: Path, files: list[str]) -> None:
    from PIL import Image

    net, processor = (
        AutoModelForImageClassification.from_pretrained(model).eval(),
        AutoImageProcessor.from_pretrained(model),
    )
    with torch.no_grad():
        found = net(**processor([Image.open(file) for file in files], return_tensors="pt")).logits.softmax(-1).numpy()
    names = [net.config.id2label[number] for number in range(found.shape[1])]
    print(json.dumps({file: dict(zip(names, map(float, row))) for file, row in zip(files, found)}))


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "pipeline":
        pipeline(Path(words[0]), words[1:])
    else:
        {"make": make, "logits": logits}[verb](*map(Path, words))
