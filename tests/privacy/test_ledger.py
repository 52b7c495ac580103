# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedsim.errors import PolicyError, PrivacyError
from fedsim.privacy import Mechanism, account
from fedsim.privacy.ledger import Budget, Ledger

PLAIN = Mechanism("gaussian", 4.0, "add/remove")
SAMPLED = Mechanism("gaussian", 1.0, "add/remove", "poisson", 0.1)
REPLACE = Mechanism("gaussian", 4.0, "replace")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def test_all_releases_are_composed_together_and_not_added_up(ledger: Ledger) -> None:
    for round_ in range(1, 11):
        ledger.charge("data", "example", SAMPLED, 10, "first", round_)
        ledger.charge("data", "example", PLAIN, 1, "second", round_)
    expected = account([(SAMPLED, 100), (PLAIN, 10)], 1e-5).epsilon
    assert Ledger(ledger.path).epsilon("data", "example", 1e-5) == pytest.approx(expected, rel=1e-12)
    alone = account([(SAMPLED, 10)], 1e-5).epsilon + account([(PLAIN, 1)], 1e-5).epsilon
    assert expected < 5 * alone


def test_data_sets_are_counted_apart_and_units_by_what_they_were_promised(ledger: Ledger) -> None:
    ledger.charge("a", "example", PLAIN, 1, "run", 1)
    assert ledger.epsilon("b", "example", 1e-5) == 0
    assert ledger.epsilon("a", "client", 1e-5) == math.inf  # nothing was promised for all of the data
    ledger.charge("c", "client", REPLACE, 1, "run", 1)
    assert ledger.epsilon("c", "example", 1e-5) == ledger.epsilon("c", "client", 1e-5)
    ledger.charge("d", "client", PLAIN, 1, "run", 1)
    halved = account([(Mechanism("gaussian", 2.0, "replace"), 1)], 1e-5).epsilon
    assert ledger.epsilon("d", "example", 1e-5) == pytest.approx(halved)
    ledger.charge_release("e", {"example": (SAMPLED, 5), "client": (REPLACE, 1)}, "run", 1)
    assert ledger.epsilon("e", "example", 1e-5) == pytest.approx(account([(SAMPLED, 5)], 1e-5).epsilon)
    assert ledger.epsilon("e", "client", 1e-5) == pytest.approx(account([(REPLACE, 1)], 1e-5).epsilon)
    assert ledger.datasets() == ["a", "c", "d", "e"]


def test_add_remove_and_replace_come_together_without_losing_anything(ledger: Ledger) -> None:
    ledger.charge("data", "example", SAMPLED, 10, "run", 1)
    ledger.charge("data", "example", REPLACE, 1, "run", 2)
    both = ledger.spent("data", "example", 1e-5)
    assert both.adjacency == "add/remove"
    assert both.epsilon == pytest.approx(account([(SAMPLED, 10), (PLAIN, 1)], 1e-5).epsilon)
    assert "at δ = 1e-05 (add/remove one example" in str(both)


def test_every_call_is_a_charge_unless_the_attempt_is_named(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.charge("data", "example", PLAIN, 1, "run", 1)
    assert len(ledger.charges()) == 3
    for _ in range(3):
        ledger.charge("data", "example", PLAIN, 1, "run", 2, attempt="mine")
    assert len(ledger.charges()) == 4
    with pytest.raises(PrivacyError, match="charged as another mechanism"):
        ledger.charge("data", "example", SAMPLED, 1, "run", 2, attempt="mine")


def test_the_budget_is_kept_also_by_two_at_once(ledger: Ledger) -> None:
    budget = Budget("example", account([(PLAIN, 5)], 1e-5).epsilon * (1 + 1e-9), 1e-5)
    refused = []

    def release() -> None:
        for round_ in range(5):
            try:
                ledger.charge_release("data", {"example": (PLAIN, 1)}, "run", round_, budget=budget)
            except PolicyError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=release) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.charges()) == 5
    assert len(refused) == 10
    assert "at δ = 1e-05" in refused[0]


def test_rounds_of_the_last_day(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 90_000)
    ledger.charge("data", "example", PLAIN, 1, "run", 1)
    monkeypatch.setattr(time, "time", real)
    ledger.charge_release("data", {"example": (PLAIN, 1), "client": (REPLACE, 1)}, "run", 2)
    assert ledger.rounds_today("data") == 1
    monkeypatch.setattr(time, "time", lambda: real() - 90_000)  # a clock that is put back forgets nothing
    assert ledger.rounds_today("data") == 2


def test_it_is_durable_private_and_never_rewritten(ledger: Ledger) -> None:
    ledger.charge("data", "example", PLAIN, 1, "run", 1)
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    with ledger._open() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    other = sqlite3.connect(ledger.path)
    for statement in ("DELETE FROM charges", "UPDATE charges SET noise_multiplier = 100"):
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            other.execute(statement)
    other.close()


def test_a_ledger_that_cannot_be_used_releases_nothing(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="missing"):
        Ledger(tmp_path / "lost.sqlite", create=False)
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"not a ledger" * 1000)
    with pytest.raises(PrivacyError, match="nothing is released"):
        Ledger(damaged)
    lost = Ledger(tmp_path / "gone.sqlite")
    lost.path.unlink()
    with pytest.raises(PrivacyError, match="nothing is released"):
        lost.charge("data", "example", PLAIN, 1, "run", 1)
    with pytest.raises(PrivacyError, match="protects no unit"):
        Ledger(tmp_path / "new.sqlite").charge_release("data", {}, "run", 1)


# --- killed at any moment -------------------------------------------------------------------------------------------

RELEASER = """
import os, signal, sys
from pathlib import Path
from fedsim.privacy.accounting import Mechanism
from fedsim.privacy.ledger import Ledger
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
for run in sys.stdin:
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    ledger = Ledger(Path(sys.argv[1]))
    released = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in range(100000):
        ledger.charge("data", "example", Mechanism("gaussian", 4.0, "add/remove"), 1, run.strip(), number)
        os.write(released, b"%s %d\\n" % (run.strip().encode(), number))
"""
"""Starts a process for each line that it reads, which charges and then releases, without end."""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.001)


def kills(tmp_path: Path, count: int, seed: int) -> None:
    """Processes that charge and then release, killed at random moments, two at a time."""
    path, out, rng = tmp_path / "ledger.sqlite", tmp_path / "released", random.Random(seed)
    command = [sys.executable, "-c", RELEASER, str(path), str(out)]
    released: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        for first in range(0, count, 2):
            starter.stdin.write(f"{first}\n{first + 1}\n")
            running = [int(starter.stdout.readline()) for _ in range(2)]
            for pid in running:
                time.sleep(rng.uniform(0, 0.05))
                kill(pid)
            released = out.read_text().split("\n")[:-1] if out.exists() else []
            charged = {f"{charge.run} {charge.round}" for charge in Ledger(path).charges()}
            assert set(released) <= charged
            assert len(charged) - len(released) <= first + 2  # each killed process lost at most the one at hand
        starter.stdin.close()
    ledger = Ledger(path)
    assert len(released) > count // 4  # on a busy machine a process may be killed before it has released anything
    spent = account([(PLAIN, len(released))], 1e-5).epsilon
    assert ledger.epsilon("data", "example", 1e-5) >= spent
    with ledger._open() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_twenty_kills_leave_nothing_uncharged(tmp_path: Path) -> None:
    kills(tmp_path, 20, 1)


@pytest.mark.slow
def test_two_hundred_kills_leave_nothing_uncharged(tmp_path: Path) -> None:
    kills(tmp_path, 200, 2)


def test_what_happens_once_is_written_down_for_good(ledger: Ledger) -> None:
    assert ledger.first_time("run", "vector 1")
    assert not Ledger(ledger.path).first_time("run", "vector 1")
    assert ledger.first_time("run", "vector 2")
    assert ledger.first_time("another", "vector 1")
    assert not ledger.charges()
