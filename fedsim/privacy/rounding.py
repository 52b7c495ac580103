# SPDX-License-Identifier: Apache-2.0
"""Printed numbers err on the careful side: no claim shrinks, and no lower bound grows, by being printed."""

from __future__ import annotations

import math


def rounded_up(epsilon: float, decimals: int = 3) -> str:
    """Some decimals (or digits, if small), rounded up: a claim must not shrink by being printed.

    A value within 1e-9 of the last digit above a printable number is printed as that number: 1.1 is "1.100".
    """
    if epsilon == 0 or not math.isfinite(epsilon):
        return "0" if epsilon == 0 else "∞"
    digits = max(decimals, decimals - 1 - math.floor(math.log10(epsilon)))
    if digits > 15:
        return f"{epsilon * (1 + 10**-decimals):.{decimals}g}"
    text = f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits > decimals else text


def rounded_down(bound: float, decimals: int = 3) -> str:
    """Some decimals, rounded down: a lower bound, or a power, must not grow by being printed."""
    return "∞" if math.isinf(bound) else f"{math.floor(bound * 10**decimals) / 10**decimals:.{decimals}f}"


def p_value_text(p_value: float) -> str:
    """Two digits, rounded up, and never 0: "at most so probable"."""
    if p_value <= 1e-300:
        return "1e-300"
    unit = 10.0 ** (math.floor(math.log10(p_value)) - 1)
    return f"{min(1.0, math.ceil(p_value / unit - 1e-9) * unit):.2g}"
