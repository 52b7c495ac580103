# SPDX-License-Identifier: Apache-2.0
"""Who plays which game: each a function (arena, trials) -> (truth, score, adjacency, notes)."""

from __future__ import annotations

from functools import partial

from fedsim.audit.playing import language, people, rows, worst_case
from fedsim.audit.playing.shadows import Player
from fedsim.scenario import GameName

_SKEW = 0.1

PLAYERS: dict[GameName, Player] = {
    "MI": rows.membership,
    "MI-BB": rows.membership,
    "MI-skew": partial(rows.membership, share=_SKEW),
    "MI-Diff": partial(rows.membership, difference=True),
    "MI-Pois": rows.poisoned,
    "MI-SQ": rows.adversarial_data,
    "AI": rows.attribute,
    "Inv": partial(rows.candidates, same_label=True, fixed=False),
    "RC": partial(rows.candidates, same_label=False, fixed=True),
    "MI-Adv": partial(worst_case.canary, fixed=False),
    "SMI": partial(worst_case.canary, fixed=True),
    "DPD": worst_case.distinguish,
    "PI": people.property_of_data,
    "MI-User": people.user,
    "MI-Subj": people.subject,
    "MM": people.mismatch,
    "RC-Targ": language.completion,
    "RC-Untarg": language.extraction,
}
