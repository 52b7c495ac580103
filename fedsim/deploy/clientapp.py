# SPDX-License-Identifier: Apache-2.0
"""The process that answers one message on a client, in place of Flower's own `flwr-clientapp`.

Flower installs the bundle that the SuperLink delivers, puts its folder first on Python's path, and imports the
ClientApp that it names. So whoever controls the SuperLink could run code on every client. Here the bundle is not even
opened: whatever it holds, the ClientApp is that of the fedsim which is installed on this machine. And for another kind
of app (an AgentApp, say) Flower starts another program, which would do the same: on a client all of them are this one.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from fedsim.errors import DeployError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

REPLACED = ("install_from_fab", "install_app_dependencies", "get_load_client_app_fn")


def write_launchers(folder: Path) -> Path:
    """A program of each name that a SuperExec starts, in a folder that goes first on its path; the folder.

    All of them run `main`: one that only refused would leave its message unanswered, and the SuperNode waiting.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    folder.mkdir(mode=0o700, exist_ok=True)
    for name in TASK_TYPE_TO_COMMAND.values():
        launcher = folder / name
        launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -m fedsim.deploy.clientapp "$@"\n')
        launcher.chmod(0o700)
    return folder


def take_no_code(runtime: ModuleType) -> None:
    """Replace what Flower's runtime would do with a bundle; DeployError where it no longer does it like this."""
    if missing := [name for name in REPLACED if not hasattr(runtime, name)]:
        raise DeployError(
            f"this version of Flower loads apps in another way ({missing[0]} is gone), so that code of the server could"
            " run here; install the version of constraints.txt"
        )
    for name, function in zip(REPLACED, (_leave, _refuse, lambda **_: _own_app), strict=True):
        setattr(runtime, name, function)


def _own_app(*_: Any) -> ClientApp:
    """The ClientApp of this machine.

    Imported here and not before: by now Flower's runtime has reported itself, which it has about a minute for, and on a
    busy machine importing torch takes long.
    """
    from fedsim.federation.client import app

    return app


def _leave(*_: Any, **__: Any) -> None:
    """The bundle stays unopened."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise DeployError("the server asks to install packages; a client installs nothing at run time")


def main() -> None:
    """Answer one message."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    take_no_code(run_clientapp)
    flwr_clientapp()


if __name__ == "__main__":
    main()
