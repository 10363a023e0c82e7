"""Data as users write them, for tests: named in recipes by `target`."""

import numpy as np


class Good:
    classes = 10

    def __init__(self, split: str, count: int = 50) -> None:
        draw = np.random.default_rng(len(split))
        self.image, self.label = draw.random((count, 8, 8, 1)), draw.integers(0, 10, count)

    def __len__(self) -> int:
        return len(self.label)

    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return {"image": self.image[indices], "label": self.label[indices]}


class Stated(Good):
    fingerprint = "v1"


class Random(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return Good.rows(self, indices) | {"image": np.random.default_rng().random((len(indices), 8, 8, 1))}


class ByPlace(Good):
    """Rows that depend on their place in the batch."""

    def rows(self, indices: np.ndarray) -> dict[str, object]:
        rows = Good.rows(self, indices)
        rows["image"] = rows["image"] + np.arange(len(indices))[:, None, None, None]  # type: ignore[operator]
        return rows


class NaN(Good):
    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.image[7] = np.nan


class Ragged(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return {"image": [np.zeros(int(index) + 1) for index in indices], "label": self.label[indices]}


class Short(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return {"image": self.image[indices][:1], "label": self.label[indices]}


class Text(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return Good.rows(self, indices) | {"name": np.array(["a"] * len(indices))}


Unstated = type("Unstated", (), {name: vars(Good)[name] for name in ("__init__", "__len__", "rows")})


class Beyond(Good):
    classes = 3


class Wide(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return Good.rows(self, indices) | {"id": indices.astype(np.int64) + 2**40}


class Empty(Good):
    def __len__(self) -> int:
        return 0


class Weighted(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        return Good.rows(self, indices) | {"weight": np.ones(len(indices))}


class Broken(Good):
    def rows(self, indices: np.ndarray) -> dict[str, object]:
        raise KeyError("image")


class Bare:
    def __init__(self, split: str) -> None: ...


def of_grain(split: str) -> object:
    import grain

    numbers = np.arange(40)
    return grain.MapDataset.source(numbers).map(lambda i: {"image": np.full((8, 8, 1), i / 40), "label": int(i) % 4})
