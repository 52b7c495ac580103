# SPDX-License-Identifier: Apache-2.0
"""The errors of a membership test: counted at one threshold, and as rates at all of them."""

from __future__ import annotations

from typing import Any

import numpy as np


def tally(said: np.ndarray, truth: np.ndarray, rule: str) -> dict[str, Any]:
    """How often "in" was said and true, with the rule by which it was said."""
    pairs = {"tp": said & truth, "fp": said & ~truth, "tn": ~said & ~truth, "fn": ~said & truth}
    return {**{name: int(cases.sum()) for name, cases in pairs.items()}, "rule": rule}


def trade_off(scores: np.ndarray, truth: np.ndarray, points: int = 201) -> dict[str, list[float]]:
    """The false positive and false negative rates of "in if above a threshold", at some of all thresholds."""
    order = np.argsort(-scores, kind="stable")
    hits, alarms = np.cumsum(truth[order]), np.cumsum(~truth[order])
    if not len(order) or not hits[-1] or not alarms[-1]:
        return {"fpr": [], "fnr": []}
    # dense where either error is rare: that is where a privacy claim is tested
    ends = np.geomspace(1, len(order), points // 2)
    chosen = np.unique(np.clip(np.concatenate([ends, len(order) + 1 - ends]).astype(int) - 1, 0, len(order) - 1))
    fpr, fnr = alarms[chosen] / alarms[-1], 1 - hits[chosen] / hits[-1]
    return {"fpr": fpr.tolist(), "fnr": fnr.tolist()}
