# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on.

Every error that a user can cause is a `FedsimError`. Its message is one sentence that names the field, the value and
the remedy; the command line prints that sentence and exits with code 2, without a traceback.
"""


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
