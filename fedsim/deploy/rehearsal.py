# SPDX-License-Identifier: Apache-2.0
"""A run held against a client's policy before anybody is asked: what is refused, and what would be spent and claimed.

It is what the client itself does with the server's messages, on a ledger that is empty and a file that nobody opens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, RecordDict

from fedsim.errors import PolicyError
from fedsim.federation.asked import Asked, Rows
from fedsim.federation.bundle import public_scenario
from fedsim.federation.plan import Plan, as_asked
from fedsim.federation.policy import Policy, load_policy, releases
from fedsim.federation.safeguards import SOURCES, Safeguards, request_of
from fedsim.federation.server import make_strategy
from fedsim.privacy import PrivacyClaim
from fedsim.privacy.charges import Charge, Spent, compose
from fedsim.privacy.ledger import check_budget
from fedsim.scenario import Scenario


def rehearse(plan: Plan, policy: Path, rows: int | None) -> tuple[int, Spent, tuple[PrivacyClaim, ...]]:
    """In how many rounds the policy's client may take part, what it spends in them, and what the server may claim.

    PolicyError for a run that the policy does not allow to its end. The client holds `rows` examples, by default the
    fewest that the policy allows; the claims are those of a server whose clients all answer every round, hold as many
    and vouch for what this policy does.
    """
    allowed, scenario = load_policy(policy), plan.scenario
    rows = allowed.smallest_examples if rows is None else rows
    own = _safeguards(plan, policy)
    config = make_strategy(plan, lambda *_: None).instructions(1, round(plan.cohort_size), ConfigRecord())
    sent = Scenario.model_validate_json(public_scenario(scenario))
    model = torch.empty(plan.layout.size, device="meta")
    own.admit(sent)
    own.check(sent, RecordDict({"config": config}), model, rows)
    parts = releases(allowed, sent, request_of(sent, config, plan.layout.size, rows))
    rounds = max(sum(client in cohort for cohort in plan.cohorts) for client in range(plan.population))
    charges = [
        [Charge(0.0, allowed.dataset, "rehearsal", n, str(n), unit, *part) for unit, part in parts.items()]
        for n in range(1, rounds + 1)
    ]
    _check_all(allowed, charges)
    tells_rows = not scenario.defence.secure_aggregation and scenario.defence.client_dp is None
    asked = [
        Asked(number, int(client), Rows(rows, rows) if tells_rows else allowed.rows)
        for number, cohort in enumerate(plan.cohorts, start=1)
        for client in cohort
    ]
    spent = compose([charge for each in charges for charge in each], allowed.unit, allowed.delta)
    return rounds, spent, as_asked(plan, asked, scenario.rounds).claims


def _safeguards(plan: Plan, policy: Path) -> Safeguards:
    """Those of a client that holds the kind of file that the scenario asks for."""
    ends = {source: end for end, source in reversed(SOURCES.items())}
    source = plan.scenario.data.source
    held = f"own.{ends[source]}" if source in ends else None
    return Safeguards("rehearsal", plan.population, policy, None, held)


def _check_all(policy: Policy, charges: list[list[Charge]]) -> None:
    """PolicyError for the first round that is over the budget; more rounds never spend less, so it is bisected."""

    def refusal(rounds: int) -> PolicyError | None:
        there = [charge for each in charges[: rounds - 1] for charge in each]
        try:
            check_budget(there, charges[rounds - 1], replace(policy.budget, a_day=None))
        except PolicyError as error:
            return error
        return None

    if not charges or refusal(len(charges)) is None:
        return
    fewest, most = 1, len(charges)
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if refusal(middle) else (middle + 1, most)
    raise PolicyError(f"the client's policy refuses round {most} of {len(charges)}: {refusal(most)}")
