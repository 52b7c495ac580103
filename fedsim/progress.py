# SPDX-License-Identifier: Apache-2.0
"""What long work shows of itself: a bar on a terminal, `name=value` lines anywhere else, nothing where it is quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape

from fedsim.errors import printable

Report = TypeVar("Report")


class Step(NamedTuple):
    """Where a bar stands."""

    words: str
    done: int
    total: int | None
    news: str = ""


@contextmanager
def showing(
    step: Callable[[Report], Step], line: Callable[[Report], str | None], *, quiet: bool, first: Step
) -> Iterator[Callable[[Report], None]]:
    """What to call with each report of the work: `step` moves a bar, `line` is printed (None: not this one).

    A quiet command still has a bar on a terminal's standard error, since only its standard output is read by programs.
    """
    errors = Console(stderr=True)
    if sys.stdout.isatty() or (quiet and errors.is_terminal):
        with _bar(errors, first) as move:
            yield lambda report: move(step(report))
    elif quiet:
        yield lambda report: None
    else:
        yield lambda report: print(printable(said), flush=True) if (said := line(report)) is not None else None


@contextmanager
def _bar(errors: Console, first: Step) -> Iterator[Callable[[Step], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[news]}"), console=errors, transient=True) as bar:
        task = bar.add_task(escape(first.words), total=first.total, completed=first.done, news="")

        def move(now: Step) -> None:
            words, news = escape(printable(now.words)), escape(printable(now.news))
            bar.update(task, description=words, completed=now.done, total=now.total, news=news)

        yield move
