# SPDX-License-Identifier: Apache-2.0
"""The commands.

What a user got wrong is one sentence on standard error and exit code 2. A traceback is always a bug of fedsim. Whatever
takes long to import (torch, flwr) is imported by the command that needs it.
"""

from __future__ import annotations

import errno
import inspect
import logging
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import click
import typer

from fedsim import output, run_command
from fedsim.deploy.commands import app as deploy_app
from fedsim.deploy.processes import interrupted_by_sigterm
from fedsim.errors import FedsimError, InterruptedCommandError, ScenarioError, printable

app = typer.Typer(
    help="Simulate a federation, play its malicious server, and audit what its privacy claim is worth.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(deploy_app, name="deploy")

ScenarioArgument = Annotated[str, typer.Argument(metavar="SCENARIO", help="A scenario's name, or the path of a file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; can be repeated.")
]
AccountantName = Literal["pld", "rdp", "prv", "all"]
EngineName = Literal["inline", "ray", "deploy"]
NoiseName = Literal["gaussian", "laplace"]
AdjacencyName = Literal["add/remove", "replace"]
UnitName = Literal["example", "client"]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]


_BAD_PATHS = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS}
INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


def command() -> click.Group:
    """The program as a click command, with the help of arguments, which typer 0.20 loses with click 8.4 and later."""
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    for child in _leaves(root):
        hints = get_type_hints(inspect.unwrap(child.callback), include_extras=True) if child.callback else {}
        for parameter in child.params:
            if isinstance(parameter, typer.core.TyperArgument):
                parameter.help = hints[str(parameter.name)].__metadata__[0].help
    return root


def _leaves(group: click.Group) -> Iterator[click.Command]:
    for child in group.commands.values():
        yield from _leaves(child) if isinstance(child, click.Group) else [child]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if strange := next((word for word in words if "\0" in word), None):
        return run_command.fail(
            f"the argument {strange!r} holds a zero byte, which no path and no value has; remove it"
        )
    if logging.lastResort is not None:  # where warnings go that nobody set up a handler for
        logging.lastResort.setFormatter(_Plain())
    with output.guarded() as written:
        code = _run(words)
    return run_command.fail(written.complaint) if written and written.complaint and code == 0 else code


class _Plain(logging.Formatter):
    """Log lines as a terminal may show them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _run(words: Sequence[str]) -> int:
    try:
        with interrupted_by_sigterm():  # a batch system's time is up: with the way to go on
            result = command().main(list(words) or ["--help"], prog_name="fedsim", standalone_mode=False)
        if result == INTERRUPTED:  # typer's answer to Ctrl-C, without a word
            return run_command.fail("interrupted", INTERRUPTED)
        return result if isinstance(result, int) else 0
    except InterruptedCommandError as error:
        return run_command.fail(str(error), INTERRUPTED)
    except FedsimError as error:
        return run_command.fail(str(error))
    except OSError as error:
        if error.errno not in _BAD_PATHS:
            raise
        from fedsim.scenario_errors import shown

        return run_command.fail(f"the path {shown(str(error.filename))} cannot be used: {error.strerror}; name another")
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "fedsim"
        return run_command.fail(f"{_once(error.format_message())} See `{where} --help`.")
    except click.ClickException as error:
        return run_command.fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return run_command.fail("interrupted", INTERRUPTED)


def _once(message: str) -> str:
    """A sentence with its full stop, and without the hint that click and typer both give."""
    message = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", message.strip())
    return message if message.endswith((".", "?", "!")) else f"{message}."


def _version(wanted: bool) -> None:
    if wanted:
        import fedsim

        print(f"fedsim {fedsim.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Simulate a federation, play its malicious server, and audit what its privacy claim is worth."""


@app.command()
def run(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="A scenario's name, or the path of a file.")
    ] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run's folder; by default the next free runs/NAME-001.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Go on with an interrupted run, in place of a scenario.")
    ] = None,
    as_json: JsonOption = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html.")] = False,
    engine: Annotated[
        EngineName | None, typer.Option(help="Where the clients run: here, on Ray, or on a SuperLink's machines.")
    ] = None,
) -> None:
    """Run a scenario: train, write down what the server sees, and report."""
    from fedsim import screen
    from fedsim.attack_screen import attack_documents, attack_rows

    overrides = [*(overrides or ()), *([f"engine.kind={engine}"] if engine else ())]
    if resume:
        finished = run_command.go_on(scenario, overrides, out, resume, as_json)
    else:
        finished = run_command.start(scenario, overrides, out, as_json)
    planned = finished.scenario
    attacks = run_command.play_attacks(finished, planned, as_json, again=False) if planned.attacks else set()
    report = run_command.report(finished, no_report)
    if as_json:
        screen.show_json({**screen.run_document(finished, report), "attacks": attack_documents(finished, attacks)})
    else:
        screen.show_rows([*screen.run_rows(finished, report), *attack_rows(finished, attacks)])


@deploy_app.command()
def submit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The deployment folder, or its server folder.")],
    scenario: ScenarioArgument,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run's folder; by default the next free DIR/server/runs/.")
    ] = None,
    as_json: JsonOption = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html.")] = False,
) -> None:
    """Run a scenario on the clients that are connected, and follow it to its end."""
    from fedsim.deploy.layout import open_server
    from fedsim.deploy.submission import prepared

    changed, path = prepared(open_server(folder), scenario, overrides or ())
    run(scenario, changed, out or path, None, as_json, no_report)


@deploy_app.command("check")
def check_policy(
    scenario: ScenarioArgument,
    policy: Annotated[Path, typer.Option(metavar="FILE", help="A client's policy.yaml.")],
    deployment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The deployment folder, for how many clients there are.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Examples that the client holds; by default the fewest it may.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Hold a scenario against a client's policy: what would be refused, spent and claimed. Nobody is asked."""
    from fedsim import screen

    loaded = run_command.of_deployment(scenario, overrides, deployment)
    from fedsim.deploy.rehearsal import rehearse
    from fedsim.federation.plan import plan

    with run_command.locating(scenario, overrides):
        planned = plan(loaded)
    screen.show_rows(screen.rehearsal_rows(planned, *rehearse(planned, policy, rows)))


@app.command()
def check(
    scenario: ScenarioArgument,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    deployment: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The deployment folder that it is to run on.")
    ] = None,
) -> None:
    """Say what would run, how long it may take, and the privacy it will have spent. Nothing is written."""
    begun = time.perf_counter()
    loaded = run_command.of_deployment(scenario, overrides, deployment)
    from fedsim import screen
    from fedsim.attack_time import attack_seconds
    from fedsim.federation.plan import estimate_seconds, plan

    with run_command.locating(scenario, overrides):
        planned = plan(loaded)
        if loaded.audit:
            from fedsim.auditing import check_audits

            check_audits(planned, loaded.audit)
        seconds = time.perf_counter() - begun  # a run has to start up too
        seconds += estimate_seconds(planned)
        attacked = attack_seconds(planned, loaded.attacks)
    if as_json:
        screen.show_json(screen.plan_document(planned, seconds, attacked))
    else:
        screen.show_rows(screen.plan_rows(planned, seconds, attacked))


@app.command()
def new(file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("scenario.yaml")) -> None:
    """Write a commented scenario to start from, with every field at its default."""
    from fedsim.scenario_file import name_from
    from fedsim.template import template

    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(template(name_from(file), shlex.quote(str(file))))
    except FileExistsError:
        raise ScenarioError(f"{file} is already there and is not overwritten; name another file") from None
    except OSError as error:
        raise ScenarioError(f"{file} cannot be written: {error.strerror}; name another file") from None
    print(printable(f"wrote {file}; try `fedsim check {shlex.quote(str(file))}`"))


@app.command()
def scenarios(as_json: JsonOption = False) -> None:
    """List the scenarios that come with fedsim, and the question that each answers."""
    from fedsim import screen
    from fedsim.scenario_file import list_scenarios

    found = list_scenarios()
    if as_json:
        screen.show_json([{"name": name, "question": question} for name, question in found])
    else:
        screen.show_rows(found)
        screen.show_hint("run one with `fedsim run NAME`; `fedsim check NAME` says beforehand how long it may take")


@app.command()
def attack(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", metavar="NAME", help="An attack, or its settings in YAML; can be repeated."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Grant other knowledge: adversary.knows.labels=known."),
    ] = None,
    as_json: JsonOption = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html again.")] = False,
) -> None:
    """Play the malicious server: what can be reconstructed from the transcript of a run."""
    import fedsim
    from fedsim import screen
    from fedsim.attack_screen import attack_documents, attack_rows
    from fedsim.session import with_attacks

    target = fedsim.open_run(folder)
    scenario = with_attacks(target, attacks or (), overrides or ())
    files = run_command.play_attacks(target, scenario, as_json, again=True)
    written = run_command.report(target, no_report)
    if as_json:
        report_path = str(written) if written else None
        screen.show_json({"folder": str(folder), "report": report_path, "attacks": attack_documents(target, files)})
    else:
        screen.show_rows([*attack_rows(target, files), *([("report", str(written))] if written else [])])


@app.command()
def audit(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A scenario, the folder of a run, or module:function.")
    ],
    audits: Annotated[
        list[str] | None,
        typer.Option("--audit", metavar="KIND", help="An audit, or its settings in YAML; can be repeated."),
    ] = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A new folder for what is written.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The ε that module:function claims.")] = None,
    delta: Annotated[float | None, typer.Option(help="The δ that module:function claims.")] = None,
    adjacency: Annotated[AdjacencyName | None, typer.Option(help="What neighbours differ by.")] = None,
    unit: Annotated[UnitName | None, typer.Option(help="What the claim of module:function protects.")] = None,
    domain: Annotated[
        tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="What numbers a record may hold.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="The most calls of module:function.")] = None,
    confidence: Annotated[float | None, typer.Option(help="A true claim survives as often; 0.95.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the audit of module:function.")] = None,
    as_json: JsonOption = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html.")] = False,
) -> None:
    """Hold a privacy claim against what an adversary achieves: consistent, violated, or inconclusive."""
    from fedsim import audit_command

    options = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "unit": unit, "domain": domain,
               "trials": trials, "confidence": confidence, "seed": seed}  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    if audit_command.is_function(target):
        audit_command.audit_function(target, given, as_json, out, no_report)
        return
    finished = audit_command.open_target(target, given, overrides or (), audits or (), out)
    finished = finished or run_command.start(target, overrides, out, as_json)
    results = audit_command.audit(finished, audits or (), as_json)
    written = run_command.report(finished, no_report)
    audit_command.show(finished, results, written, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")], as_json: JsonOption = False
) -> None:
    """Write the report of a run again."""
    import fedsim
    from fedsim import screen
    from fedsim.report import holds_only_audits, write_report

    path = write_report(folder if holds_only_audits(folder) else fedsim.open_run(folder).path)
    if as_json:
        screen.show_json({"report": str(path)})
    else:
        print(printable(str(path)))


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")], as_json: JsonOption = False
) -> None:
    """Say how far a run is, and why it ended; the exit code is 1 for a run that failed."""
    from fedsim import screen
    from fedsim.following import FAILED, status, status_rows

    found = status(folder)
    if as_json:
        screen.show_json(found)
    else:
        screen.show_rows(status_rows(found))
    if found["state"] == "failed":
        raise typer.Exit(FAILED)


@app.command()
def logs(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a deployed run.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on to the end of the run.")] = False,
) -> None:
    """Print what the server of a deployed run has printed."""
    from fedsim.following import log_lines

    for piece in log_lines(folder, follow=follow):
        print(piece, end="", flush=True)
        if output.unread():  # a run may go on for days
            break


@app.command()
def epsilon(
    sigma: Annotated[float | None, typer.Option(help="Noise scale divided by the sensitivity; finds ε.")] = None,
    target: Annotated[float | None, typer.Option(help="The ε that may be spent; finds σ, in place of --sigma.")] = None,
    rate: Annotated[float, typer.Option(help="The probability with which a unit joins a release (Poisson).")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="How many releases there are.")] = 1,
    delta: Annotated[float, typer.Option(help="The δ of the claim.")] = 1e-5,
    accountant: Annotated[AccountantName, typer.Option(help="Which accountant is asked.")] = "all",
    noise: Annotated[NoiseName, typer.Option(help="The distribution of the noise.")] = "gaussian",
    as_json: JsonOption = False,
) -> None:
    """Find what so much noise spends (--sigma), or how much noise a budget needs (--target)."""
    from fedsim import screen
    from fedsim.epsilon import ACCOUNTANTS, Question, answers, document

    question = Question(rate, steps, delta, sigma, target, noise)
    found = answers(question, [name for name in ACCOUNTANTS if accountant in (name, "all")])
    if as_json:
        screen.show_json(document(question, list(found)))
        return
    first = next(found)  # before the heading: a question that nobody can answer is an error and nothing else
    print(question.sentence())
    for answer in chain([first], found):
        screen.show_rows([(answer.accountant, answer.sentence(target))])


@app.command()
def schema() -> None:
    """Print the JSON schema of scenario files, from which editors complete field names."""
    from fedsim import screen
    from fedsim.scenario_file import json_schema

    screen.show_json(json_schema())


@app.command()
def ledger(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A client's ledger, or the folder that holds it.")],
    delta: Annotated[float, typer.Option(help="The δ at which ε is stated.")] = 1e-5,
    as_json: JsonOption = False,
) -> None:
    """Show what a client has spent of its privacy, over all runs."""
    from fedsim import screen
    from fedsim.deploy.accounts import ledger_document, ledger_rows

    if as_json:
        screen.show_json(ledger_document(file, delta))
    else:
        screen.show_rows(ledger_rows(file, delta))


if __name__ == "__main__":
    sys.exit(main())
