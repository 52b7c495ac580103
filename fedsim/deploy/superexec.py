# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperExec, with the tokens of tasks out of the process list.

Flower 1.41 starts the process of a task with its token among the arguments, where every account of the machine can read
it, and with it take the task's place. Its programs also read a token from a file: here each is given one that has no
name, open in that process alone.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from fedsim.errors import DeployError

TOKEN = "--token"


def start_without_token(arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process as `subprocess.Popen` would, with `--token X` handed over in a file that only it has open."""
    words = list(arguments)
    if TOKEN not in words:
        return subprocess.Popen(words, **options)
    place = words.index(TOKEN)
    with tempfile.TemporaryFile() as file:  # readable by its owner only, and without a name
        file.write(words[place + 1].encode())
        file.flush()
        words[place : place + 2] = [f"{TOKEN}-file", f"/dev/fd/{file.fileno()}"]
        return subprocess.Popen(words, pass_fds=[file.fileno()], **options)


def hide_tokens(executor: ModuleType) -> None:
    """Make Flower's executor start processes like that; DeployError where it does not use `subprocess` any more."""
    if getattr(executor, "subprocess", None) is not subprocess:
        raise DeployError(
            "this version of Flower starts tasks in another way, so that their tokens may be in the process list;"
            " install the version of constraints.txt"
        )
    own = SimpleNamespace(Popen=start_without_token, DEVNULL=subprocess.DEVNULL)
    setattr(executor, "subprocess", own)  # noqa: B010 - a module's name, which mypy would take for its type


def main() -> None:
    """Run Flower's SuperExec."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    hide_tokens(subprocess_executor)
    flower_superexec()


if __name__ == "__main__":
    main()
