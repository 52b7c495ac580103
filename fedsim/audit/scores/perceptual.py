# SPDX-License-Identifier: Apache-2.0
"""How alike two pictures are: PSNR, SSIM, and a perceptual distance that needs no trained network.

Pictures are (n, ..., height, width) with values in [0, 1]; scores are (n,).
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

HIGHEST_PSNR = 150.0
"""dB. Equal pictures have an infinite PSNR, of which no mean can be taken; float32 cannot tell much more than this."""
_SCALES = 4
_CONTRAST, _LIGHT = 0.0026, 0.01  # below these (squared) a difference is not seen; 0.0026: Xue et al. 2014, Section IV


def mean_squared_error(a: Tensor, b: Tensor) -> Tensor:
    """(n,) mean of the squared differences, in float64."""
    return (a.double() - b.double()).flatten(1).square().mean(1)


def psnr(mse: Tensor) -> Tensor:
    """10 log10(1 / MSE) in dB, for a value range of 1, at most HIGHEST_PSNR."""
    return -10 * mse.double().clamp(min=10 ** (-HIGHEST_PSNR / 10)).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) in windows of 7, or the largest odd size that fits; NaN below 3."""
    from skimage.metrics import structural_similarity  # here, because it takes a second to import

    side = min(a.shape[-2:]) if a.dim() > 2 else 0
    window = min(7, side - (side + 1) % 2)
    if window < 3 or not len(a):
        return torch.full((len(a),), math.nan, dtype=torch.float64)
    pairs = zip(_channels(a).numpy(), _channels(b).numpy(), strict=True)
    values = [structural_similarity(x, y, win_size=window, channel_axis=0, data_range=1.0) for x, y in pairs]
    return torch.from_numpy(np.array(values, dtype=np.float64))


def gradient_distance(a: Tensor, b: Tensor) -> Tensor:
    """In [0, 1]: how different the edges and the brightness of two pictures are, over up to four scales; 0 if equal.

    At each scale and place the gradients (Prewitt) are compared as vectors, s = (2 a·b + c) / (|a|² + |b|² + c), and
    the local means as l = (2 ab + c') / (a² + b² + c'); the distance is the mean of (1 − s l) / 2. It is the gradient
    similarity of GMSD (Xue et al. 2014) with direction, so that a negative is far from its picture, pooled by the mean
    over scales. Like LPIPS it forgives what a person forgives (slight noise and shifts of grey) more than MSE does;
    unlike LPIPS nothing in it is learned.
    """
    a, b = _channels(a), _channels(b)
    if not len(a) or min(a.shape[-2:]) < 3:
        return torch.full((len(a),), math.nan, dtype=torch.float64)
    total, scales = torch.zeros(len(a), dtype=torch.float64), 0
    while scales < _SCALES and min(a.shape[-2:]) >= 3:
        total += (1 - _edges_alike(a, b) * _light_alike(a, b)).flatten(1).mean(1) / 2
        scales += 1
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return (total / scales).clamp(min=0.0).round(decimals=9)


def _channels(x: Tensor) -> Tensor:
    """(n, channels, height, width) in float64."""
    return x.detach().double().reshape(len(x), -1, *x.shape[-2:]) if x.dim() > 2 else x.double()[:, None, None]


def _edges_alike(a: Tensor, b: Tensor) -> Tensor:
    (ax, ay), (bx, by) = _gradients(a), _gradients(b)
    return (2 * (ax * bx + ay * by) + _CONTRAST) / (ax**2 + ay**2 + bx**2 + by**2 + _CONTRAST)


def _light_alike(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.avg_pool2d(a, 3, stride=1), F.avg_pool2d(b, 3, stride=1)
    return (2 * a * b + _LIGHT) / (a**2 + b**2 + _LIGHT)


def _gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Prewitt: the difference of the two outer rows (columns) of a 3×3 window, averaged along them."""
    rows, columns = F.avg_pool2d(x, (1, 3), stride=1), F.avg_pool2d(x, (3, 1), stride=1)
    return rows[..., 2:, :] - rows[..., :-2, :], columns[..., 2:] - columns[..., :-2]
