# SPDX-License-Identifier: Apache-2.0
"""Opacus's DP-SGD, called as it is, on data sets that really differ by one row.

`PrivacyEngine.make_private` of Opacus 1.6 computes the sampling rate, 1 / ⌈n/B⌉, and the number that the noisy sum is
divided by, ⌊n / ⌈n/B⌉⌋, from the number n of rows. Both may change with one row, and the divisor scales the noise of
every weight: the more weights, the plainer it shows how many rows there were (Opacus's issues 571 and 819). So the
verdict under add/remove depends on the sizes. Where the number of rows is public, a row is removed by making its
gradient zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.audit.mechanism import Subject
from fedsim.audit.verdict import Claim

Floats = NDArray[np.float64]
Rng = np.random.Generator
Private = tuple[Any, Any, Any, Callable[[float], float]]
"""Model, optimizer, loader, and what the accountant computes at δ."""


@dataclass(frozen=True)
class OpacusSetting:
    """What the user chooses: σ and B; `rate` and `divisor` where they are given and not computed from the rows."""

    noise_multiplier: float
    batch_size: int = 5
    rate: float | None = None

    def made(self, records: Floats) -> Private:
        """Everything that a step needs, for records (x, label)."""
        import torch
        from torch.utils.data import TensorDataset

        x, y = torch.tensor(records[:, :-1], dtype=torch.float32), torch.tensor(records[:, -1]).long()
        model = torch.nn.Linear(x.shape[1], 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its randomness is not cryptographic
            by = self._by_engine if self.rate is None else self._by_hand
            return by(model, optimizer, TensorDataset(x, y))

    def _by_engine(self, model: Any, optimizer: Any, rows: Any) -> Private:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader

        engine = PrivacyEngine(accountant="prv")
        made = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(rows, batch_size=self.batch_size),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=1.0,
        )
        return (*made, engine.get_epsilon)

    def _by_hand(self, model: Any, optimizer: Any, rows: Any) -> Private:
        """The same parts, put together with a rate and a divisor that do not look at the rows."""
        from opacus import GradSampleModule
        from opacus.accountants import PRVAccountant
        from opacus.data_loader import DPDataLoader
        from opacus.optimizers import DPOptimizer

        assert self.rate is not None
        accountant = PRVAccountant()
        private = DPOptimizer(
            optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=1.0,
            expected_batch_size=self.batch_size,
        )
        private.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=self.rate))
        loader: Any = DPDataLoader(rows, sample_rate=self.rate)
        return GradSampleModule(model), private, loader, accountant.get_epsilon


@dataclass(frozen=True, eq=False)
class OpacusStep:
    """One step of `DPOptimizer` on a Poisson batch of `DPDataLoader`, from zero weights."""

    setting: OpacusSetting

    def __call__(self, records: Floats, rng: Rng) -> Floats:
        """One step."""
        return np.asarray(self.batch(records, rng, 1)[0])

    def batch(self, records: Floats, rng: Rng, trials: int) -> Floats:
        """So many steps of one engine; the weights are put back to zero after each, so that they are independent."""
        import torch

        torch.manual_seed(int(rng.integers(2**62)))
        model, optimizer, loader, _ = self.setting.made(records)
        (weight,) = model.parameters()
        rows: list[Floats] = []
        while len(rows) < trials:
            for x, y in loader:
                _step(model, optimizer, x, y)
                rows.append(weight.detach().double().flatten().numpy().copy())
                with torch.no_grad():
                    weight.zero_()
        return np.stack(rows[:trials])


def _step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    import torch

    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook")  # its hooks, on inputs without gradients
        torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@cache
def _claimed(setting: OpacusSetting, rows: int, width: int, delta: float) -> float:
    """ε by Opacus's own PRV accountant after one step on so many rows."""
    model, optimizer, loader, epsilon = setting.made(np.zeros((rows, width + 1)))
    _step(model, optimizer, *next(iter(loader)))
    return float(epsilon(delta))


def opacus_dp_sgd(
    rows: int = 11,
    batch_size: int = 5,
    *,
    width: int = 3,
    noise_multiplier: float = 0.8,
    delta: float = 1e-2,
    rate: float | None = None,
    zeroed: bool = False,
    trials: int = 16_000,
) -> Subject:
    """One step of a linear model of 2·`width` weights; the row that is removed has a gradient far beyond the norm.

    The data sets have `rows` and `rows` − 1 rows; with `zeroed` both have `rows`, and the row is made zero. Claimed is
    the larger ε that Opacus's accountant computes for the two. `rate` is given by hand, with B as the divisor.
    """
    from fedsim.privacy.accounting import Mechanism, epsilon

    setting = OpacusSetting(noise_multiplier, batch_size, rate)
    first = np.zeros((rows, width + 1))
    first[0, 0], first[0, -1] = 100.0, 1.0
    second = np.zeros_like(first) if zeroed else first[1:]
    claimed = max(_claimed(setting, len(part), width, delta) for part in (first, second))
    size = f"{rows} rows, one of them zeroed" if zeroed else f"{rows} rows or {rows - 1}"
    pair = (first, second, f"{size}, batch size {batch_size}")
    exact = None
    if zeroed or rate is not None:
        share = rate or 1 / -(-rows // batch_size)
        exact = epsilon(Mechanism("gaussian", noise_multiplier, "add/remove", "poisson", share), 1, delta)
    return Subject(OpacusStep(setting), Claim(claimed, delta), [pair], exact_epsilon=exact, trials=trials)
