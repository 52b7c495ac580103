# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on.

Every error that a user can cause is a `FedsimError`. Its message is one sentence that names the field, the value and
the remedy; the command line prints that sentence and exits with code 2, without a traceback.
"""

from __future__ import annotations

import json
import re

_UNSEEN = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


class FedsimError(Exception):
    """Base of every error that a user can cause and mend."""


class ScenarioError(FedsimError):
    """The scenario asks for something that is impossible, contradictory or misspelt."""


class DataError(FedsimError):
    """The data cannot be read, or is not what the scenario says that it is."""


class ModelError(FedsimError):
    """The model cannot be built, or does not fit the data."""


class PrivacyError(FedsimError):
    """A privacy parameter is outside the range in which its guarantee holds."""


class RunError(FedsimError):
    """A run folder is missing, incomplete, damaged or in the way."""


class FolderTakenError(RunError):
    """The folder of a new run is already there."""


class AttackError(FedsimError):
    """An attack cannot be played on what the server saw."""


class AuditError(FedsimError):
    """An audit is asked for something that cannot be tested, or is given numbers that cannot be."""


class InterruptedCommandError(FedsimError):
    """A command was interrupted; its message says what is left and how to go on."""


class DeployError(FedsimError):
    """A deployed federation is not set up as it must be, or does not answer."""


class PolicyError(FedsimError):
    """The server asks a client for something that the client's own policy does not allow."""


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`: as messages for people have it."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for people: 24 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 100 else f"{count:.3g} TB"


def printable(text: str) -> str:
    r"""The text as a terminal may show it: nothing in it can move the cursor, or reverse or hide letters.

    Control characters (except line ends), those that set the direction of text, and those that have no width are
    written as their escapes, `\x1b`, `\u202e`: a message may echo what anybody wrote into a file.
    """
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def printable_json(text: str) -> str:
    """The same for a JSON document, whose value stays as it is."""
    return _UNSEEN.sub(lambda found: json.dumps(found.group())[1:-1], text)
