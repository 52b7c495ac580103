# SPDX-License-Identifier: Apache-2.0
"""What a client has spent of its privacy, over all runs, restarts and crashes.

An SQLite file that belongs to the client. Every release is charged before it leaves, and a charge is on the disk before
`charge` returns (write-ahead log, synchronous=FULL: one fsync for each charge). A crash between the two leaves a charge
for something that never left; the other way round cannot be. Nothing is ever changed or removed: triggers refuse it.

What was spent is not a sum of epsilons: `charges.compose` says how all releases of a data set count together.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from fedsim.errors import PolicyError, PrivacyError
from fedsim.privacy.accounting import Mechanism
from fedsim.privacy.charges import Charge, Spent, compose
from fedsim.privacy.claim import Unit
from fedsim.privacy.rounding import rounded_up

DAY = 86400.0
_VERSION = 1
_WAIT = 60.0  # seconds that one process waits for another
_SCHEMA = """
CREATE TABLE charges (
    number INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    dataset TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt TEXT NOT NULL,
    unit TEXT NOT NULL CHECK (unit IN ('example', 'client')),
    kind TEXT NOT NULL,
    noise_multiplier REAL NOT NULL,
    adjacency TEXT NOT NULL,
    sampling TEXT NOT NULL,
    sample_rate REAL NOT NULL,
    compositions INTEGER NOT NULL CHECK (compositions >= 1),
    UNIQUE (dataset, unit, run, round, attempt)
);
CREATE TRIGGER never_changed BEFORE UPDATE ON charges BEGIN SELECT RAISE(ABORT, 'a charge is never changed'); END;
CREATE TRIGGER never_removed BEFORE DELETE ON charges BEGIN SELECT RAISE(ABORT, 'a charge is never removed'); END;
"""
_ONCE = """
CREATE TABLE IF NOT EXISTS once (run TEXT NOT NULL, what TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (run, what))
"""


@dataclass(frozen=True)
class Budget:
    """The most that may be spent, and how often a day (the last 24 hours) something may be released.

    The day is that of this machine's clock. Where the clock was put back, what was charged later than now counts as
    today's: a cap may then last longer than a day, never shorter. What is spent for ever and in a run needs no clock.
    """

    unit: Unit
    epsilon: float
    delta: float
    a_day: int | None = None
    """Releases."""
    epsilon_a_run: float | None = None
    epsilon_a_day: float | None = None


Parts = Mapping[Unit, tuple[Mechanism, int]]
"""What one release spends: for each unit that it protects a mechanism, and how often it is composed."""


class Ledger:
    """The ledger in a file, which is created if it is not there (unless `create` is False)."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = Path(path)
        if not self.path.exists():
            if not create:
                raise PrivacyError(f"the ledger {path} is missing; restore it from a backup, nothing is released")
            self._create()
        with self._open():  # which looks whether it is one
            pass

    def charge(
        self,
        dataset: str,
        unit: Unit,
        mechanism: Mechanism,
        compositions: int,
        run: str,
        round: int,  # noqa: A002 # the word of the contract
        *,
        attempt: str | None = None,
    ) -> None:
        """Charge a release that protects one unit; see `charge_release`."""
        self.charge_release(dataset, {unit: (mechanism, compositions)}, run, round, attempt=attempt)

    def charge_release(
        self,
        dataset: str,
        parts: Parts,
        run: str,
        round: int,  # noqa: A002
        *,
        attempt: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Write down what a release is going to spend; it is on the disk when this returns. Or refuse, over the budget.

        Without `attempt` every call is a charge. With one, a charge that is already there is not repeated: name an
        attempt only for a release of which at most one copy can ever leave, and never let the server choose the name.
        """
        if not parts:
            raise PrivacyError("a release that protects no unit cannot be charged; it must not leave")
        new = [
            Charge(time.time(), dataset, run, round, attempt or uuid.uuid4().hex, unit, mechanism, int(compositions))
            for unit, (mechanism, compositions) in parts.items()
        ]
        new = [replace(charge, attempt=new[0].attempt) for charge in new]
        with self._transaction() as connection:
            there = {_key(charge): charge for charge in _read(connection, dataset)}
            for charge in new:
                same = there.get(_key(charge))
                if same and (same.mechanism, same.compositions) != (charge.mechanism, charge.compositions):
                    raise PrivacyError(f"attempt {charge.attempt} of round {round} is charged as another mechanism")
            fresh = [charge for charge in new if _key(charge) not in there]
            if budget is not None and fresh:
                check_budget(list(there.values()), fresh, budget)
            connection.executemany(f"INSERT INTO charges VALUES (NULL{', ?' * 12})", map(_row, fresh))

    def first_time(self, run: str, what: str) -> bool:
        """Write down that something is done in a run, durably; False if it was written down before.

        For what must happen once whatever a crash or a server does, as the use of a mask; it spends nothing.
        """
        with self._transaction() as connection:
            connection.execute(_ONCE)
            done = connection.execute("INSERT OR IGNORE INTO once VALUES (?, ?, ?)", (run, what, time.time()))
            return done.rowcount == 1

    def charges(self, dataset: str | None = None) -> list[Charge]:
        """Every charge, in the order in which they were made."""
        with self._open() as connection:
            return _read(connection, dataset)

    def datasets(self) -> list[str]:
        """The data sets that something was charged for."""
        return sorted({charge.dataset for charge in self.charges()})

    def spent(self, dataset: str, unit: Unit, delta: float) -> Spent:
        """What all releases of a data set spent together."""
        return compose(self.charges(dataset), unit, delta)

    def epsilon(self, dataset: str, unit: Unit, delta: float) -> float:
        """The ε of `spent`."""
        return self.spent(dataset, unit, delta).epsilon

    def would_spend(self, dataset: str, unit: Unit, mechanism: Mechanism, compositions: int, delta: float) -> float:
        """The ε after one more release."""
        more = Charge(time.time(), dataset, "", 0, uuid.uuid4().hex, unit, mechanism, compositions)
        return compose([*self.charges(dataset), more], unit, delta).epsilon

    def rounds_today(self, dataset: str) -> int:
        """How many releases were charged in the last 24 hours (or, by a clock that was put back, later than now)."""
        return _recent(self.charges(dataset))

    # --- the file ---------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        """Make the file under another name, and give it its own when it is complete."""
        partial = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with sqlite3.connect(partial) as connection:
                connection.executescript(f"{_SCHEMA} PRAGMA user_version = {_VERSION};")
            connection.close()
            os.link(partial, self.path)  # fails, where rename would overwrite what another process just made
        except FileExistsError:
            pass
        except (OSError, sqlite3.Error) as error:
            raise PrivacyError(f"the ledger {self.path} cannot be made ({error}); nothing is released") from error
        finally:
            partial.unlink(missing_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        connection: sqlite3.Connection | None = None
        try:
            address = f"{self.path.resolve().as_uri()}?mode=rw"  # never made anew: a lost ledger is no empty one
            connection = sqlite3.connect(address, uri=True, timeout=_WAIT, isolation_level=None)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != _VERSION:  # before anything is written to what may be somebody else's file
                raise PrivacyError(f"{self.path} is not a ledger of this version ({version} in place of {_VERSION})")
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise PrivacyError(f"the ledger {self.path} is on a file system without WAL; put it on a local disk")
            connection.execute("PRAGMA synchronous = FULL")
            yield connection
        except sqlite3.Error as error:
            raise PrivacyError(
                f"the ledger {self.path} cannot be used ({error}), so nothing is released; free the disk, or restore it"
            ) from error
        finally:
            if connection is not None:
                connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Nobody else writes meanwhile; all or nothing is written, and it is on the disk at the end."""
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


def check_budget(there: Sequence[Charge], fresh: Sequence[Charge], budget: Budget) -> None:
    """PolicyError for charges that are over the budget, after those that are there."""
    if budget.a_day is not None and _recent(there) >= budget.a_day:
        raise PolicyError(
            f"rounds_a_day is {budget.a_day}, and {_recent(there)} rounds were answered in the last 24 hours; wait"
        )
    for_good = "it is refused for good unless the owner raises the budget"
    total = _check_epsilon("largest_epsilon", there, fresh, budget.epsilon, budget, "", for_good)
    in_run = [charge for charge in there if charge.run == fresh[0].run]
    for name, most, some, when, remedy in (
        ("largest_epsilon_a_run", budget.epsilon_a_run, in_run, " in this run", "the rest is for other runs"),
        ("largest_epsilon_a_day", budget.epsilon_a_day, _of_today(there), " in the last 24 hours", "wait"),
    ):
        if most is not None and total > most:  # else a part of it is not above it either
            _check_epsilon(name, some, fresh, most, budget, when, remedy)


def _check_epsilon(
    name: str, there: Sequence[Charge], fresh: Sequence[Charge], most: float, budget: Budget, when: str, remedy: str
) -> float:
    """The ε of all charges; PolicyError, if that is more than is allowed."""
    after = compose([*there, *fresh], budget.unit, budget.delta)
    if not after.epsilon <= most:
        before = compose(there, budget.unit, budget.delta)
        raise PolicyError(
            f"{name} is {most:g} at δ = {budget.delta:g} for one {budget.unit}, of which"
            f" {rounded_up(before.epsilon)} is spent{when}, and this round would make it {rounded_up(after.epsilon)};"
            f" {remedy}"
        )
    return after.epsilon


def _of_today(charges: Sequence[Charge]) -> list[Charge]:
    """Those of the last 24 hours (or, by a clock that was put back, later than now)."""
    since = time.time() - DAY
    return [charge for charge in charges if charge.time > since]


def _recent(charges: Sequence[Charge]) -> int:
    return len({(charge.run, charge.round, charge.attempt) for charge in _of_today(charges)})


def _key(charge: Charge) -> tuple[str, Unit, str, int, str]:
    return charge.dataset, charge.unit, charge.run, charge.round, charge.attempt


def _row(charge: Charge) -> tuple[object, ...]:
    first = (charge.time, charge.dataset, charge.run, charge.round, charge.attempt, charge.unit)
    return *first, *astuple(charge.mechanism), charge.compositions


def _read(connection: sqlite3.Connection, dataset: str | None) -> list[Charge]:
    where, values = ("WHERE dataset = ?", (dataset,)) if dataset is not None else ("", ())
    rows = connection.execute(f"SELECT * FROM charges {where} ORDER BY number", values)
    return [_charge(row) for row in rows]


def _charge(row: Sequence[Any]) -> Charge:
    when, dataset, run, number, attempt, unit, *mechanism, compositions = row[1:]
    return Charge(when, dataset, run, number, attempt, unit, Mechanism(*mechanism), compositions)
