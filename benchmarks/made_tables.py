# SPDX-License-Identifier: Apache-2.0
"""Tables of made-up people, with what public tables of scikit-learn lack: dependence, heavy tails, many categories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from fedsim.data import Dataset
from fedsim.data.table import from_frame
from fedsim.scenario import EmbeddedData

Columns = dict[str, np.ndarray]
Made = tuple[Columns, np.ndarray]
ROWS = 3000


def made(name: str, seed: int = 0) -> Dataset:
    """The table of this name."""
    columns, target = {**FITTED, **HELD_OUT}[name](np.random.default_rng(seed))
    frame = pd.DataFrame(columns)
    frame["target"] = target.astype(str)
    return from_frame(name, frame, "target", EmbeddedData(source="breast_cancer"), 0)


def _named(prefix: str, codes: np.ndarray) -> np.ndarray:
    return np.array([f"{prefix}{int(code):03d}" for code in codes])


def _justice(rng: np.random.Generator) -> Made:
    """Ages with a category that follows from them, counts that are mostly 0, a score and its decile, like COMPAS."""
    age = np.clip(18 + rng.gamma(2, 8, ROWS), 18, 90).astype(int)
    priors = rng.negative_binomial(0.6, 0.15, ROWS) * (age > 20)
    score = 0.08 * priors - 0.05 * (age - 30) + rng.logistic(size=ROWS)
    decile = np.clip(np.digitize(score, np.quantile(score, np.linspace(0.1, 0.9, 9))) + 1, 1, 10)
    columns = {
        "sex": np.where(rng.random(ROWS) < 0.8, "m", "f"),
        "age": age,
        "age_cat": np.where(age < 25, "young", np.where(age > 45, "old", "middle")),
        "race": rng.choice(list("abcdef"), ROWS, p=[0.51, 0.34, 0.08, 0.05, 0.01, 0.01]),
        "juv_fel": rng.poisson(0.06, ROWS),
        "juv_misd": rng.poisson(0.09, ROWS) * (rng.random(ROWS) < 0.5),
        "juv_other": rng.poisson(0.1, ROWS),
        "priors": priors,
        "degree": np.where(rng.random(ROWS) < 0.65, "F", "M"),
        "charge": _named("c", np.minimum(rng.zipf(1.5, ROWS), 60)),
        "decile": decile,
        "text": np.where(decile > 7, "High", np.where(decile > 4, "Medium", "Low")),
    }
    return columns, np.where(score > np.median(score), "yes", "no")


def _chain(rng: np.random.Generator) -> Made:
    """Fourteen categories, each mostly a function of the one before."""
    code, columns = rng.integers(0, 8, ROWS), {}
    for number in range(14):
        width = 3 + number % 9
        code = np.where(rng.random(ROWS) < 0.85, (3 * code + number) % width, rng.integers(0, width, ROWS))
        columns[f"k{number}"] = _named("v", code)
    return columns, np.where((code % 2 == 0) ^ (rng.random(ROWS) < 0.2), "p", "q")


def _heavy(rng: np.random.Generator) -> Made:
    """Log-normal numbers with a common factor, and counts with a tail like 1 / n^1.7."""
    factor = rng.standard_normal(ROWS)
    columns: Columns = {
        f"x{i}": np.round(np.exp(1.5 * (0.6 * factor + 0.8 * rng.standard_normal(ROWS))), 2) for i in range(8)
    }
    for i in range(4):
        columns[f"n{i}"] = np.where(rng.random(ROWS) < 0.8, 0, np.minimum(rng.zipf(1.7, ROWS), 5000))
    for i in range(3):
        columns[f"k{i}"] = _named("v", np.digitize(factor + rng.standard_normal(ROWS), [-1, 0, 1]))
    return columns, np.where(factor + rng.standard_normal(ROWS) > 0.5, "p", "q")


def _many(rng: np.random.Generator) -> Made:
    """Up to a hundred categories in a column, five classes."""
    factor, columns = rng.standard_normal(ROWS), {}
    for i, width in enumerate((4, 12, 30, 60, 100, 2)):
        share = 1 / np.arange(1, width + 1) ** 1.1
        columns[f"k{i}"] = _named("v", rng.choice(width, ROWS, p=share / share.sum()))
    for i in range(4):
        columns[f"x{i}"] = np.round(0.7 * factor + 0.7 * rng.standard_normal(ROWS), 3)
    return columns, rng.choice(list("abcde"), ROWS, p=[0.4, 0.3, 0.15, 0.1, 0.05])


def _clinic(rng: np.random.Generator) -> Made:
    """Measurements with -1 for missing, and diagnoses that follow from them."""
    sick = rng.random(ROWS) < 0.3
    columns: Columns = {"age": np.clip(rng.normal(55 + 8 * sick, 18), 0, 100).astype(int)}
    for i in range(6):
        value = np.round(rng.normal(1.2 * sick, 1) + 0.3 * rng.standard_t(3, ROWS), 1)
        columns[f"lab{i}"] = np.where(rng.random(ROWS) < 0.25, -1.0, value)
    columns["ward"] = _named("w", np.minimum(rng.geometric(0.25, ROWS), 20))
    columns["code"] = np.where(columns["lab0"] > 1, "E11", np.where(columns["lab1"] > 1, "I10", "Z00"))
    columns["smoker"] = rng.choice(["never", "once", "now"], ROWS, p=[0.7, 0.2, 0.1])
    return columns, np.where(sick ^ (rng.random(ROWS) < 0.1), "yes", "no")


def _ledger(rng: np.random.Generator) -> Made:
    """Payments: amounts over five decades, hours, shops, and a flag that is nearly always off."""
    big = rng.random(ROWS) < 0.05
    hour = (rng.normal(14, 4, ROWS) % 24).astype(int)
    columns: Columns = {
        "amount": np.round(np.exp(rng.normal(3 + 3 * big, 1.2)), 2),
        "balance": np.round(rng.pareto(1.5, ROWS) * 1000, 2),
        "hour": hour,
        "night": np.where((hour < 6) | (hour > 22), "yes", "no"),
        "shop": _named("s", np.minimum(rng.zipf(1.3, ROWS), 150)),
        "country": rng.choice(["DE", "FR", "PL", "US", "CN"], ROWS, p=[0.85, 0.06, 0.05, 0.03, 0.01]),
        "online": rng.choice(["y", "n"], ROWS),
        "tries": rng.poisson(0.05 + 2 * big),
    }
    return columns, np.where(big, "fraud", "fine")


def _survey(rng: np.random.Generator) -> Made:
    """Twenty answers from 1 to 5 that one opinion explains, as categories and as numbers."""
    opinion = rng.standard_normal(ROWS)
    answers = [np.digitize(opinion + 0.7 * rng.standard_normal(ROWS), [-1.5, -0.5, 0.5, 1.5]) + 1 for _ in range(20)]
    columns: Columns = {f"q{i}": _named("a", each) if i % 2 else each for i, each in enumerate(answers)}
    return columns, np.where(opinion + 0.5 * rng.standard_normal(ROWS) > 0, "left", "right")


FITTED: dict[str, Callable[[np.random.Generator], Made]] = {
    "justice": _justice,
    "chain": _chain,
    "heavy": _heavy,
    "many": _many,
}
"""With the public tables, those that the curve was fitted on."""
HELD_OUT: dict[str, Callable[[np.random.Generator], Made]] = {"clinic": _clinic, "ledger": _ledger, "survey": _survey}
"""That no constant was chosen on."""
