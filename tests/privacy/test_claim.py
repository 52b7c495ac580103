# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.errors import PrivacyError
from fedsim.privacy import PrivacyClaim

CLAIM = PrivacyClaim(
    epsilon=1.8282436,
    delta=1e-5,
    unit="example",
    adjacency="add/remove",
    sampling="poisson",
    released="every update",
    observer="the server",
    accountant="PLD",
    mechanism="gaussian noise",
    noise_multiplier=1.0,
    sample_rate=0.01,
    compositions=1000,
    assumptions=("the sizes are public",),
)


def test_the_sentence_never_shows_epsilon_alone_and_rounds_up() -> None:
    sentence = CLAIM.sentence()
    for part in ("ε ≤ 1.829", "δ = 1e-05", "example", "add/remove", "the server", "PLD", "Poisson", "1,000 times"):
        assert part in sentence
    assert sentence.count("\n") == 0
    assert "takes part most often" not in sentence


def test_a_claim_prints_as_its_sentence() -> None:
    assert str(CLAIM) == CLAIM.sentence()


def test_the_sentence_says_what_a_client_is_counted_for() -> None:
    """Forty rounds and 'composed 6 times' look like a mistake without it."""
    claim = dataclasses.replace(CLAIM, unit="client", sampling="none", sample_rate=1.0, compositions=6)
    assert "composed 6 times (the rounds of the client that takes part most often)" in claim.sentence()


@settings(derandomize=True)
@given(st.floats(1e-12, 1e4))
def test_a_printed_epsilon_is_never_smaller(epsilon: float) -> None:
    printed = dataclasses.replace(CLAIM, epsilon=epsilon).sentence().split("ε ≤ ")[1].split()[0]
    assert epsilon * (1 - 1e-6) <= float(printed) <= epsilon * 1.01 + 1e-3


def test_an_infinite_epsilon_is_no_claim() -> None:
    claim = dataclasses.replace(CLAIM, epsilon=math.inf)
    assert not claim.finite
    assert claim.sentence().lower().startswith("no privacy claim")
    assert "ε" not in claim.sentence()


@pytest.mark.parametrize("epsilon", [0.0, 1.8282436461219649, math.inf])
def test_json_round_trip(epsilon: float) -> None:
    claim = dataclasses.replace(CLAIM, epsilon=epsilon)
    text = json.dumps(claim.to_dict(), allow_nan=False)
    assert PrivacyClaim.from_dict(json.loads(text)) == claim
    assert json.loads(text)["epsilon"] == ("inf" if math.isinf(epsilon) else epsilon)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", -0.1),
        ("epsilon", math.nan),
        ("delta", 1.0),
        ("delta", -1e-9),
        ("delta", math.nan),
        ("unit", "person"),
        ("adjacency", "swap"),
        ("sampling", "shuffle"),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.inf),
        ("sample_rate", 0.0),
        ("sample_rate", 1.5),
        ("compositions", -1),
    ],
)
def test_a_claim_that_means_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(PrivacyError, match=field):
        dataclasses.replace(CLAIM, **{field: value})


def test_a_damaged_dictionary_is_refused() -> None:
    fields = CLAIM.to_dict()
    with pytest.raises(PrivacyError, match="unit"):
        PrivacyClaim.from_dict({key: value for key, value in fields.items() if key != "unit"})
    with pytest.raises(PrivacyError, match="extra"):
        PrivacyClaim.from_dict({**fields, "extra": 1})
    with pytest.raises(PrivacyError, match="cannot be read"):
        PrivacyClaim.from_dict({**fields, "epsilon": "little"})
