# SPDX-License-Identifier: Apache-2.0
"""The same photographs, networks and gradients for every contestant of `inversion.py`, and how a result is scored.

Photographs that come with scikit-image and scikit-learn: nothing is downloaded. Needs neither fedsim nor breaching.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

CLASSES, SHAPE = 100, (3, 32, 32)
MEAN = torch.tensor([0.5071, 0.4867, 0.4408]).view(3, 1, 1)  # of CIFAR-100
STD = torch.tensor([0.2675, 0.2565, 0.2761]).view(3, 1, 1)
CHOSEN = [0, 6, 11, 16, 37, 41, 2, 13, 8, 18, 35, 43, 26, 31, 21, 40]  # windows that enter a batch, in this order
LABELS = [7, 52, 23, 91, 64, 3, 38, 80, 15, 46, 29, 71, 99, 58, 84, 11]  # all different


def photographs() -> Tensor:
    """(45, 3, 32, 32) in [0, 1]: five square windows of each of nine photographs."""
    from skimage import data
    from skimage.transform import resize
    from sklearn.datasets import load_sample_images

    pictures = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.retina()]
    pictures += [data.immunohistochemistry(), data.hubble_deep_field(), *load_sample_images().images]
    crops = []
    for picture in pictures:
        image = picture[..., :3].astype(np.float64) / 255.0
        height, width = image.shape[:2]
        side = min(height, width)
        windows = [
            (0, 0, side),
            (height - side, width - side, side),
            (height // 4, width // 4, side // 2),
            (height // 3, width // 2, side // 3),
            (height // 8, width // 8, side // 2),
        ]
        for top, left, size in windows:
            row, column = min(top, height - size), min(left, width - size)
            window = image[row : row + size, column : column + size]
            crops.append(resize(window, SHAPE[1:], anti_aliasing=True))
    return torch.tensor(np.stack(crops), dtype=torch.float32).permute(0, 3, 1, 2).contiguous()


class Cnn3(nn.Module):
    """Two convolutions with average pooling, two linear layers, ReLU; of the FedAvg attack of Dimitrov et al. 2022."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, padding=1)
        self.f1, self.f2 = nn.Linear(128 * 8 * 8, 200), nn.Linear(200, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.c1(x).relu(), 2)
        x = F.avg_pool2d(self.c2(x).relu(), 2)
        return self.f2(self.f1(x.flatten(1)).relu())


def lenet() -> nn.Module:
    """Zhu et al. 2019: sigmoids, weights from U(-0.5, 0.5)."""
    layers: list[nn.Module] = []
    for channels, stride in ((3, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(channels, 12, 5, stride, 2), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 8 * 8, CLASSES))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def mlp() -> nn.Module:
    """Three hidden layers of 200 with ReLU, on raw pixels."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (3072, 200, 200):
        layers += [nn.Linear(inputs, 200), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(200, CLASSES))


MODELS = {"cnn3": Cnn3, "lenet": lenet, "mlp": mlp}


def make_model(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


def make_batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised images, labels, and the images in [0, 1]."""
    images = photographs()[CHOSEN[:size]]
    return (images - MEAN) / STD, torch.tensor(LABELS[:size]), images


def gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    loss = F.cross_entropy(model(inputs), labels)
    return [each.detach() for each in torch.autograd.grad(loss, list(model.parameters()))]


def digest(tensors: list[Tensor]) -> str:
    """To see that two processes attack the very same gradient."""
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def psnr(found: Tensor, images: Tensor) -> float:
    """Mean PSNR in [0, 1] after the best assignment of normalised reconstructions to the originals."""
    pixels = (found.detach().float() * STD + MEAN).clamp(0, 1)
    errors = (pixels[:, None] - images[None]).square().flatten(2).mean(-1).double().numpy()
    rows, columns = linear_sum_assignment(errors)
    return float((-10 * np.log10(np.maximum(errors[rows, columns], 1e-20))).mean())
