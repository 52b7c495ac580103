# SPDX-License-Identifier: Apache-2.0
"""An audit.json by the code that judges, of scores from fixed seeds: no model is trained for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.audit.evidence.federated import Evidence
from fedsim.audit.federation import judge
from fedsim.audit.games import game_named
from fedsim.audit.one_run_sum import Setting, play, summarise
from fedsim.audit.playing.trials import Trials, judge_trials
from fedsim.audit.verdict import Claim
from fedsim.privacy import Mechanism, PrivacyClaim, account

ROUNDS, NOISE, DELTA = 6, 2.0, 1e-5


def the_claim() -> PrivacyClaim:
    spent = account([(Mechanism("gaussian", NOISE, "add/remove"), ROUNDS)], DELTA).epsilon
    return PrivacyClaim(
        epsilon=spent,
        delta=DELTA,
        unit="client",
        adjacency="add/remove",
        sampling="none",
        released="every update",
        observer="the server, which knows who takes part in which round",
        accountant="PLD",
        mechanism="gaussian noise on each clipped update",
        noise_multiplier=NOISE,
        sample_rate=1.0,
        compositions=ROUNDS,
    )


def evidence(noise: float, canaries: int = 600, *, whole: bool = True) -> Evidence:
    """What a server sees of canaries in noise of that size; `whole` False: of a transcript, which has none."""
    rng = np.random.default_rng(7)
    included = rng.random(canaries) < 0.5
    seen = included[:, None] + noise * rng.standard_normal((canaries, ROUNDS))
    return Evidence(
        claim=the_claim(),
        scores_in=seen[included].ravel(),
        scores_out=seen[~included].ravel(),
        included=included if whole else np.zeros(0, bool),
        totals=seen.sum(1) if whole else np.zeros(0),
        whole=np.ones(canaries if whole else 0, bool),
        joined=int(included.sum()) * ROUNDS,
        chances=int(included.sum()) * ROUNDS,
        echo=(0.01, canaries * (ROUNDS - 1)),
        accuracy=0.8,
    )


def game(shift: float, trials: int = 400, *, claim: Claim | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(11)
    truth = rng.random(trials) < 0.5
    played = Trials(game_named("MI"), truth, rng.standard_normal(trials) + shift * truth, "add/remove", ("a note",))
    return judge_trials(played, claim).to_dict()


def one_run_sum() -> dict[str, Any]:
    settings = [
        Setting("Q2.1", (1.0, 4.0, 16.0), 100, 1000),
        *(Setting("Q2.2", (16.0,), count, 1000) for count in (16, 64)),
        *(Setting("Q2.3", (16.0,), 100, dimension) for dimension in (10, 1000)),
    ]
    outcomes = [found for setting in settings for seed in range(3) for found in play(setting, seed=seed)]
    numbers = {"rows": summarise(outcomes), "outcomes": [outcome.to_dict() for outcome in outcomes]}
    return {"verdict": None, "sentence": "21 audits of noisy sums.", "numbers": numbers}


def audits() -> list[dict[str, Any]]:
    """One of each kind: canaries in the noise that is claimed and in half of it, a transcript, games, the sum."""
    found = [
        ("client-canaries", judge(evidence(NOISE)).to_dict()),
        ("client-canaries", judge(evidence(NOISE / 2)).to_dict()),
        ("transcript", judge(evidence(NOISE, whole=False)).to_dict()),
        ("game", game(1.0, claim=Claim(2.0, DELTA))),
        ("game", game(50.0, claim=Claim(0.5, DELTA))),  # a perfect attack
        ("game", game(1.0)),  # nothing is claimed
        ("one-run-sum", one_run_sum()),
    ]
    return [{"kind": kind, "settings": {"kind": kind}, **result} for kind, result in found]


def write_audits(run: Path) -> Path:
    document = {"fedsim": "0", "scenario": "a-scenario", "audits": audits()}
    (run / "audit.json").write_text(json.dumps(document, allow_nan=False))
    return run
