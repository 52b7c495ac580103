# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsim.deploy import client, init
from fedsim.deploy.admission import Admission
from fedsim.deploy.contact import Contact, contact_file, write_contact
from fedsim.deploy.layout import Client, open_client, open_server
from fedsim.deploy.processes import Processes, Program, environment, find, listens, together
from fedsim.deploy.server import serve
from fedsim.errors import DeployError


def program(code: str, folder: Path, name: str = "program") -> Program:
    return Program(name, (sys.executable, "-S", "-c", code), folder)


SLEEP = "import time; time.sleep(60)"


def test_all_end_together_when_one_ends(tmp_path: Path) -> None:
    with together(environment(tmp_path)) as processes:
        processes.start(program(SLEEP, tmp_path, "stays"))
        processes.start(program("raise SystemExit(7)", tmp_path, "ends"))
        other = processes.running[0][1]
        assert processes.watch() == ("ends", "ended with exit code 7")
    assert other.returncode == -signal.SIGTERM
    assert processes.running == []


def test_who_waits_is_told_what_ended_or_that_it_takes_too_long(tmp_path: Path) -> None:
    processes = Processes(environment(tmp_path))
    processes.start(program("raise SystemExit(3)", tmp_path, "broken"))
    with pytest.raises(DeployError, match="broken ended with exit code 3"):
        processes.wait_for(lambda: False, 30, "it")
    processes.stop()
    processes.start(program(SLEEP, tmp_path))
    with pytest.raises(DeployError, match="it is not ready after"):
        processes.wait_for(lambda: False, 0.3, "it")
    processes.stop()


def test_sigterm_ends_the_children_too(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fedsim.deploy.processes import *;\n"
        "with together(environment(Path('.'))) as p:\n"
        f"    p.start(Program('child', (sys.executable, '-S', '-c', {SLEEP!r}), Path('.')))\n"
        "    print(p.running[0][1].pid, flush=True)\n"
        "    p.watch()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()
        parent.wait(20)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_program_that_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(DeployError, match=r"no-such-program is not installed; install it"):
        find("no-such-program", "install it")


def test_a_server_does_not_start_over_another(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert listens("127.0.0.1", port)
        init.create(tmp_path / "fed", 1, ["localhost"], superlink_port=port)
        with pytest.raises(DeployError, match=f"superlink_port {port} is already in use"):
            serve(open_server(tmp_path / "fed"))


def test_a_client_that_ends_is_started_again_and_more_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init.create(tmp_path / "fed", 1, ["localhost"])
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(client, "_run", lambda _: ("SuperNode", "ended with exit code 75"))
    monkeypatch.setattr(client, "ask", lambda _: Admission("accepted", ""))
    monkeypatch.setattr(client, "listens", lambda *_: False)
    monkeypatch.setattr(client, "_sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        client.join(open_client(tmp_path / "fed" / "client-1"), None, None)
    for pause, whole in zip(pauses, (1, 2, 4, 8, 15, 15, 15, 15), strict=True):
        assert whole / 2 <= pause <= whole  # a server that is back has all its clients within a minute
    assert len(set(pauses)) == len(pauses)  # clients that failed together do not come back together
    assert "SuperNode ended with exit code 75" in caplog.text


def test_a_supernode_whose_client_was_let_in_is_signed_off_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Flower refuses the next one for up to a minute."""
    init.create(tmp_path / "fed", 1, ["localhost"])
    done: list[str] = []

    def run(which: Client) -> tuple[str, str]:
        done.append("run")
        write_contact(contact_file(which.path), Contact(time.monotonic(), time.monotonic(), 17))
        if done.count("run") == 3:
            raise KeyboardInterrupt
        return "SuperNode", "ended"

    monkeypatch.setattr(client, "_run", run)
    monkeypatch.setattr(client, "ask", lambda _: Admission("accepted", ""))
    monkeypatch.setattr(client, "leave", lambda _, node: done.append(f"leave {node}"))
    monkeypatch.setattr(client, "_sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        client.join(open_client(tmp_path / "fed" / "client-1"), None, None)
    assert done == ["run", "leave 17", "run", "leave 17", "run"]  # never another's: it may run on another machine


def test_nothing_is_started_before_the_server_accepts_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init.create(tmp_path / "fed", 1, ["localhost"])
    answers = [Admission("unreachable", "no route")] * 2 + [Admission("unknown", "revoked")] * 2
    pauses: list[float] = []
    monkeypatch.setattr(client, "ask", lambda _: answers.pop(0) if answers else Admission("accepted", ""))
    monkeypatch.setattr(client, "_sleep", pauses.append)
    client._wait_for_server(open_client(tmp_path / "fed" / "client-1"))
    assert [pause >= client.UNKNOWN / 2 for pause in pauses] == [False, False, True, True]
    assert (caplog.text.count("no route"), caplog.text.count("revoked")) == (1, 1)


def test_a_token_is_in_no_process_list_and_arrives_all_the_same(tmp_path: Path) -> None:
    """By the launcher of a client, whose shell and Python have it open, too."""
    from types import ModuleType

    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    from fedsim.deploy.superexec import hide_tokens

    token = "5ec4e7" * 8
    program = tmp_path / "task.py"
    program.write_text(
        "import argparse, pathlib, sys\n"
        "from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--runtime-api-address')\n"
        "add_args_flwr_app_common(parser=parser)\n"
        "found = try_obtain_flwr_app_token(parser.parse_args())\n"
        "listed = pathlib.Path('/proc/self/cmdline').read_text()\n"
        f"pathlib.Path({str(tmp_path / 'found')!r}).write_text(found + ' ' + str(found in listed))\n"
    )
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -I {program} "$@"\n')
    launcher.chmod(0o700)
    own = ModuleType("executor")
    own.__dict__.update(vars(subprocess_executor))
    hide_tokens(own)
    started = own.subprocess.Popen([str(launcher), "--token", token, "--insecure"])
    assert token not in " ".join(started.args)
    assert started.wait(60) == 0
    assert (tmp_path / "found").read_text() == f"{token} False"
    with pytest.raises(DeployError, match="starts tasks in another way"):
        hide_tokens(ModuleType("another version"))
    # And Flower's own executor hands over what is replaced here.
    asked: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_executor.subprocess, "Popen", lambda words, **_: asked.append(words))
        spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", token, True, None, False, 1, False, 1, None)
        subprocess_executor.SubprocessExecutor().launch(spec)
    assert asked[0][asked[0].index("--token") + 1] == token
