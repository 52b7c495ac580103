# SPDX-License-Identifier: Apache-2.0
"""The commands: what they print for people and for programs, what they write, and that they start quickly."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.cli import main
from fedsim.scenario_file import load_scenario, scenario_names

TINY = """\
name: tiny
question: Does it run?
data: {source: digits, limit: 200}
model: logistic
client: {learning_rate: 0.2, batch_size: 10}
cohort: {population: 4, size: 3}
rounds: 3
"""
PRIVATE = (
    TINY.replace("size: 3", "rate: 0.7, sampling: poisson")
    + "defence: {secure_aggregation: true, client_dp: {noise_multiplier: 1.5, delta: 1e-4}}\n"
)


@pytest.fixture(autouse=True)
def _in_a_folder_with_scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    Path("private.yaml").write_text(PRIVATE)


def fedsim(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints on standard output."""
    found = main(list(arguments))
    out, err = capsys.readouterr()
    assert found == code, err
    return out if code == 0 else err


def assert_epsilon_is_never_alone(text: str) -> None:
    """Wherever an epsilon stands, its delta and its unit stand beside it."""
    for line in text.splitlines():
        if re.search(r"ε ≤|epsilon=", line):
            assert re.search(r"δ = |delta=", line), line
            assert re.search(r"per unit|[Ee]ach (client|example)|unit=(client|example)", line), line


# --- run ------------------------------------------------------------------------------------------------------------


def test_run_prints_a_line_a_round_and_a_closing_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = fedsim(capsys, "run", "tiny.yaml")
    lines = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in out.splitlines() if line.startswith("round=")]
    assert [line["round"] for line in lines] == ["0", "1", "2", "3"]
    assert {line["of"] for line in lines} == {"3"}
    for line in lines[1:]:
        assert set(line) == {"round", "of", "clients", "failures", "train_loss", "loss", "accuracy"}
        assert (line["clients"], line["failures"]) == ("3", "0")
        assert 0 <= float(line["accuracy"]) <= 1
    table = out[out.index("\nran: ") :]
    for words in ("tiny: fedavg, 3 rounds, 3 of 4 clients", "logistic", "no claim", "runs/tiny-001", "report.html"):
        assert words in table
    assert f"{float(lines[-1]['accuracy']):.4f}" in table
    assert Path("runs/tiny-001/report.html").is_file()


def test_run_under_privacy_tells_what_was_spent(capsys: pytest.CaptureFixture[str]) -> None:
    out = fedsim(capsys, "run", "private.yaml", "--no-report")
    last = next(line for line in out.splitlines() if line.startswith("round=3 "))
    epsilon = float(re.findall(r"epsilon=(\S+)", last)[0])
    assert re.search(r"epsilon=\S+ delta=0.0001 unit=client adjacency=add/remove$", last)
    assert last.count("epsilon=") == 1  # a parser that keeps the last of several would keep the wrong one
    assert_epsilon_is_never_alone(out)
    claim = json.loads(Path("runs/tiny-001/claims.json").read_text())[0]
    assert (claim["delta"], claim["unit"]) == (1e-4, "client")
    assert 0 <= epsilon - claim["epsilon"] < 1e-3 + 1e-9  # rounded up
    assert "Each client is protected" in out
    assert not Path("runs/tiny-001/report.html").exists()


def test_run_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(fedsim(capsys, "run", "private.yaml", "--json", "--out", "here", "--set", "rounds=1"))
    assert (document["folder"], document["rounds"]) == ("here", 1)
    assert Path(document["report"]).is_file()
    assert {"epsilon", "delta", "unit", "adjacency", "sentence"} <= set(document["claims"][0])
    assert not Path("runs").exists()


def test_run_overrides_and_counts_up(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        fedsim(capsys, "run", "tiny.yaml", "--no-report", "--set", "rounds=1", "--set", "client.epochs=2")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny-001", "tiny-002"]
    written = load_scenario("runs/tiny-002/scenario.yaml")
    assert (written.rounds, written.client.epochs) == (1, 2)


def test_run_does_not_write_into_a_folder_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    assert "taken is already there" in fedsim(capsys, "run", "tiny.yaml", "--out", "taken", code=2)
    assert list(Path("taken").iterdir()) == []


def test_an_interrupted_run_says_how_to_go_on_and_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim import screen

    real = screen.round_line

    def interrupting(report: object) -> str:
        line = real(report)  # type: ignore[arg-type]
        if line.startswith("round=2 "):
            raise KeyboardInterrupt
        return line

    with monkeypatch.context() as patched:
        patched.setattr(screen, "round_line", interrupting)
        told = fedsim(capsys, "run", "tiny.yaml", "--no-report", code=130)
    assert told == "error: interrupted; go on with `fedsim run --resume runs/tiny-001`\n"
    resumed = fedsim(capsys, "run", "--resume", "runs/tiny-001")
    assert "round=3 of=3" in resumed
    fedsim(capsys, "run", "tiny.yaml")
    for name in ("metrics.jsonl", "model.safetensors", "transcript/messages.jsonl", "claims.json"):
        assert Path("runs/tiny-001", name).read_bytes() == Path("runs/tiny-002", name).read_bytes(), name


def test_an_interrupt_before_anything_is_written_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.federation import run as backend

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "run", interrupted)
    assert fedsim(capsys, "run", "tiny.yaml", code=130) == "error: interrupted; nothing was written\n"


def test_an_interrupt_while_the_report_is_written_says_that_the_run_is_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim import report

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(report, "write_report", interrupted)
        told = fedsim(capsys, "run", "tiny.yaml", "--out", "here", code=130)
    assert told == "error: interrupted; here is complete but for its report, write that with `fedsim report here`\n"
    fedsim(capsys, "report", "here")


def test_an_interrupt_anywhere_else_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim import screen

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(screen, "show_rows", interrupted)
    assert fedsim(capsys, "scenarios", code=130) == "error: interrupted\n"


def test_a_run_that_diverges_is_not_told_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    rate = ("--set", "client.learning_rate=1e30")
    told = fedsim(capsys, "run", "tiny.yaml", "--no-report", *rate, code=2)
    assert "lower client.learning_rate, here 1e+30, or scale the data, and run the scenario again" in told
    assert "--resume" not in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["runn"], "No such command 'runn'. Did you mean 'run'? See `fedsim --help`."),
        (["run", "tiny.yaml", "more"], "Got unexpected extra argument (more). See `fedsim run --help`."),
        (["run", "tiny.yaml", "--set", ""], "--set '': an override is FIELD=VALUE, for example client.epochs=5"),
    ],
)
def test_what_was_mistyped_is_told_once_and_in_whole_sentences(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedsim(capsys, *arguments, code=2) == f"error: {told}\n"


def test_the_public_names_can_be_completed() -> None:
    import fedsim as package

    assert {*package.__all__, "__version__"} <= {*dir(package)}


def test_a_plan_is_what_check_shows(capsys: pytest.CaptureFixture[str]) -> None:
    import fedsim as package

    shown = json.loads(fedsim(capsys, "check", "tiny.yaml", "--json"))
    planned = package.plan("tiny.yaml")
    assert isinstance(planned, package.Plan)
    for name in ("population", "parameters", "steps_per_round", "messages", "transcript_bytes", "notes"):
        assert getattr(planned, name) == shown[name]
    assert package.plan("tiny.yaml", overrides=["rounds=1"]).messages == 4
    assert package.plan(planned.scenario, overrides=["rounds=1"]).messages == 4
    assert len(repr(planned)) < 200


@pytest.mark.parametrize("name", ["tiny.yaml", "private.yaml"])
def test_metrics_are_plain_columns_and_epsilon_is_never_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import fedsim as package

    fedsim(capsys, "run", name, "--out", "run", "--no-report")
    run = package.open_run("run")
    table = run.metrics
    assert not table.map(lambda cell: isinstance(cell, (list, dict))).any().any()
    columns = [name for name in table if name.startswith("epsilon")]
    assert len(columns) == len(run.claims)
    for column, claim in zip(columns, run.claims, strict=True):
        last = table.iloc[-1]
        companions = [column.replace("epsilon", name) for name in ("delta", "unit", "adjacency", "observer")]
        assert last[column] == pytest.approx(claim.epsilon)
        assert [last[name] for name in companions] == [claim.delta, claim.unit, claim.adjacency, claim.observer]
        assert table[column].isna().tolist() == [True, *[False] * run.scenario.rounds]


def test_an_empty_ledger_says_that_nothing_was_charged(capsys: pytest.CaptureFixture[str]) -> None:
    from fedsim.privacy.ledger import Ledger

    Ledger(Path("ledger.sqlite"))
    assert fedsim(capsys, "ledger", "ledger.sqlite") == "charged: nothing so far\n"


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.federation import plan as backend

    def broken(scenario: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(backend, "plan", broken)
    with pytest.raises(ZeroDivisionError):
        main(["check", "tiny.yaml"])


# --- check ----------------------------------------------------------------------------------------------------------


def test_one_of_a_kind_is_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--set", "data.test_fraction=0.0001", "--set", "client.steps=1", "--set", "rounds=1"]
    assert "at most 1 local step for a client" in fedsim(capsys, "check", "tiny.yaml", *one)
    assert re.search(r"accuracy: \S+ on 1 held-out row$", fedsim(capsys, "run", "tiny.yaml", *one), re.MULTILINE)


def test_check_says_what_would_run_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    out = fedsim(capsys, "check", "tiny.yaml")
    for words in ("Does it run?", "digits", "3 of 4 clients", "logistic, 650 parameters", "3 rounds", "no claim"):
        assert words in out
    assert "at most 5 local steps" in out  # 200 rows, 4 clients, batches of 10
    assert "12 messages" in out  # a model and three updates in each of three rounds
    assert re.search(r"time: about \d+ (second|minute)", out)
    assert sorted(Path().iterdir()) == before


def test_check_tells_the_privacy_that_the_run_will_have_spent(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(fedsim(capsys, "check", "private.yaml", "--json"))
    assert_epsilon_is_never_alone(fedsim(capsys, "check", "private.yaml"))
    ran = json.loads(fedsim(capsys, "run", "private.yaml", "--json", "--no-report"))
    assert told["claims"] == ran["claims"]
    assert told["messages"] == len(Path("runs/tiny-001/transcript/messages.jsonl").read_text().splitlines())
    kept = sum(path.stat().st_size for path in Path("runs/tiny-001/transcript").glob("*.safetensors"))
    assert told["transcript_bytes"] == pytest.approx(kept, rel=0.2)


@pytest.mark.parametrize("name", scenario_names())
def test_every_packaged_scenario_can_be_checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(fedsim(capsys, "check", name, "--json"))
    assert document["seconds"] < 300
    assert document["transcript_bytes"] < 100e6
    for claim in document["claims"]:
        assert 0 < claim["epsilon"] <= 16
        assert claim["delta"] * document["population"] < 0.1 or claim["unit"] == "example"
    defence = load_scenario(name).defence
    assert bool(document["claims"]) == bool(defence.example_dp or defence.client_dp)


RECURRENT = """\
from torch import nn

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.last = nn.{layer}(8, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x):
        return self.last(self.recurrent(x.reshape(len(x), 8, 8))[0][:, -1])

def rows(input_shape, classes):
    return Rows()
"""


@pytest.mark.parametrize("layer", ["GRU", "LSTM"])
def test_a_model_that_opacus_cannot_do_is_refused_before_anything_is_written(
    layer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"recurrent_{layer.lower()}"
    Path(f"{module}.py").write_text(RECURRENT.replace("{layer}", layer))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    text = TINY.replace("model: logistic", f"model: import:{module}:rows")
    Path("gru.yaml").write_text(f"{text}defence: {{example_dp: {{noise_multiplier: 1.5, delta: 1e-4}}}}\n")
    told = fedsim(capsys, "check", "gru.yaml", code=2)
    assert told.startswith(f"error: gru.yaml:4: model.name import:{module}:rows: the gradients of this model")
    assert "defence.client_dp" in told
    assert fedsim(capsys, "run", "gru.yaml", "--out", "gru", code=2) == told
    assert not Path("gru").exists()
    Path("plain.yaml").write_text(text)
    fedsim(capsys, "check", "plain.yaml")  # without example-level privacy there is nothing wrong with it


@pytest.mark.parametrize(("kind", "unit"), [("example-canaries", "example"), ("client-canaries", "client")])
def test_an_audit_that_does_not_fit_is_refused_before_the_scenario_is_run(
    kind: str, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("audited.yaml").write_text(f"{TINY}audit: [{kind}]\n")
    for command in ("check", "audit"):
        told = fedsim(capsys, command, "audited.yaml", code=2)
        assert told.startswith(f"error: audited.yaml:8: audit {kind}: the scenario claims nothing for {unit}s; set")
    told = fedsim(capsys, "audit", "tiny.yaml", "--audit", kind, code=2)
    assert "claims nothing" in told
    assert not Path("runs").exists()


# --- the other commands ---------------------------------------------------------------------------------------------


def test_report_writes_the_same_report_again(capsys: pytest.CaptureFixture[str]) -> None:
    fedsim(capsys, "run", "tiny.yaml", "--set", "rounds=1")
    page = Path("runs/tiny-001/report.html")
    first = page.read_bytes()
    page.unlink()
    assert Path(fedsim(capsys, "report", "runs/tiny-001").strip()) == page
    assert page.read_bytes() == first
    assert json.loads(fedsim(capsys, "report", "runs/tiny-001", "--json")) == {"report": str(page)}


@pytest.mark.parametrize("content", ["", "{}", "[1]", None])
def test_a_damaged_summary_is_written_again(content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    fedsim(capsys, "run", "tiny.yaml", "--set", "rounds=1", "--out", "here")
    file = Path("here/summary.json")
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_text(content)
    if content == "":
        assert "let `fedsim run --resume here` write it again" in fedsim(capsys, "report", "here", code=2)
    fedsim(capsys, "run", "--resume", "here")
    assert file.read_bytes() == before
    fedsim(capsys, "report", "here")


def test_what_cannot_be_mended_by_going_on_is_not_told_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    fedsim(capsys, "run", "tiny.yaml", "--set", "rounds=1", "--out", "here", "--no-report")
    with Path("here/metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    for arguments in (["report", "here"], ["run", "--resume", "here"]):
        told = fedsim(capsys, *arguments, code=2)
        assert "metrics.jsonl is damaged" in told
        assert "restore it from a backup, or run the scenario again" in told
        assert "--resume" not in told


def test_new_writes_a_scenario_that_loads_and_never_overwrites(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`fedsim check 'my scenario.yaml'`" in fedsim(capsys, "new", "my scenario.yaml")
    assert load_scenario("my scenario.yaml").name == "my-scenario"
    before = Path("tiny.yaml").read_bytes()
    assert "tiny.yaml is already there" in fedsim(capsys, "new", "tiny.yaml", code=2)
    assert Path("tiny.yaml").read_bytes() == before
    fedsim(capsys, "new")
    assert load_scenario("scenario.yaml").name == "scenario"


def test_scenarios_lists_names_and_questions(capsys: pytest.CaptureFixture[str]) -> None:
    out = fedsim(capsys, "scenarios")
    listed = json.loads(fedsim(capsys, "scenarios", "--json"))
    assert [entry["name"] for entry in listed] == scenario_names()
    for entry in listed:
        assert re.search(rf"^{entry['name']}: .*{re.escape(entry['question'])}", out, re.M)


def test_schema_prints_the_committed_schema(capsys: pytest.CaptureFixture[str]) -> None:
    committed = Path(__file__).resolve().parents[1] / "scenarios" / "scenario.schema.json"
    assert fedsim(capsys, "schema") == committed.read_text()


def test_epsilon_agrees_with_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("epsilon", "--sigma", "1.1", "--rate", "0.01", "--steps", "1000", "--delta", "1e-5")
    out = fedsim(capsys, *arguments)
    assert_epsilon_is_never_alone(out.split("\n", 1)[1])
    for words in ("add/remove", "Poisson", "per unit", "δ = 1e-05"):
        assert words in out.split("\n", 1)[0]
    document = json.loads(fedsim(capsys, *arguments, "--json"))
    found = {answer["accountant"]: answer["epsilon"] for answer in document["answers"]}
    assert set(found) == {"pld", "rdp", "prv"}
    assert found["pld"] <= found["prv"] + 1e-6 <= found["rdp"]
    assert document["delta"] == 1e-5


def test_epsilon_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rate", "0.02", "--steps", "200", "--delta", "1e-6", "--accountant", "pld")
    found = json.loads(fedsim(capsys, "epsilon", "--target", "2", *arguments, "--json"))["answers"][0]
    assert 1.99 < found["epsilon"] <= 2
    printed = fedsim(capsys, "epsilon", "--target", "2", *arguments)
    sigma = re.findall(r"σ = ([\d.]+)", printed)[0]
    again = json.loads(fedsim(capsys, "epsilon", "--sigma", sigma, *arguments, "--json"))["answers"][0]
    assert 1.99 < again["epsilon"] <= 2, "the printed sigma must keep the budget too"


def test_epsilon_shows_which_accountant_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    out = fedsim(capsys, "epsilon", "--sigma", "2", "--noise", "laplace")
    assert re.search(r"^pld: ε ≤ 0\.5", out, re.M)
    assert re.search(r"^prv: .*gaussian", out, re.M)


def test_without_noise_there_is_no_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no finite ε" in fedsim(capsys, "epsilon", "--sigma", "0", "--accountant", "pld")
    document = json.loads(fedsim(capsys, "epsilon", "--sigma", "0", "--accountant", "pld", "--json"))
    assert document["answers"][0]["epsilon"] == "inf"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"fedsim \d+\.\d+\S*\n", fedsim(capsys, "--version"))
    for arguments in ([], ["--help"], ["-h"]):
        out = fedsim(capsys, *arguments)
        assert all(name in out for name in ("run", "check", "new", "scenarios", "report", "epsilon", "schema"))


# --- a process of its own -------------------------------------------------------------------------------------------


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fedsim.cli", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["scenarios"], ["run", "nothing-of-that-name"], ["schema"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; from fedsim.cli import main; main({arguments!r}); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stderr.splitlines()[-1]
    for heavy in ("'torch'", "'flwr'", "'numpy'", "'pandas'", "'matplotlib'"):
        assert heavy not in loaded


def test_light_commands_start_quickly() -> None:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        begun = used()
        assert _command("scenarios").returncode == 0
        times.append(used() - begun)
    assert min(times) < 1.0  # of processor time: what else runs on the machine does not count


def test_an_error_of_a_process_is_one_line_and_exit_code_two() -> None:
    done = _command("run", "tiny.yaml", "--set", "rounds=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --set rounds=none: rounds is")
    assert done.stderr.count("\n") == 1


def test_what_is_piped_has_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    out = fedsim(capsys, "check", "private.yaml", "--set", f"question={'long ' * 60}")
    rows = [line.split(": ", 1) for line in out.splitlines()]
    assert all(len(row) == 2 and re.fullmatch("[a-z ]+", row[0]) for row in rows)
    assert [name for name, _ in rows[:3]] == ["scenario", "data", "clients"]


def test_check_notes_what_should_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    loose = ("--set", "defence.client_dp.delta=0.3")
    assert "note: δ = 0.3 is not below 1/4" in fedsim(capsys, "check", "private.yaml", *loose)
    assert "note" not in fedsim(capsys, "check", "private.yaml")


def test_sigterm_ends_a_run_with_the_way_to_go_on() -> None:
    command = [sys.executable, "-m", "fedsim", "run", "tiny.yaml", "--set", "rounds=100000", "--out", "long"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("round=2 "):
            assert process.poll() is None
        process.terminate()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "fedsim run --resume long" in errors


def test_status_knows_a_run_that_goes_on_from_one_that_was_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "fedsim", "run", "tiny.yaml", "--set", "rounds=8000", "--out", "long"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("round=2 "):
            assert process.poll() is None
        before = sorted(path.name for path in Path("long").iterdir())
        told = fedsim(capsys, "status", "long")
        assert process.poll() is None
        assert {*before} <= {path.name for path in Path("long").iterdir()} | {"checkpoint.tmp"}
        process.kill()
    assert "state: running" in told
    assert "resume" not in told
    told = fedsim(capsys, "status", "long")
    assert "state: interrupted" in told
    assert "go on with: fedsim run --resume long" in told
    Path("long/.lock").unlink()
    assert "state: interrupted" in fedsim(capsys, "status", "long")
    assert not Path("long/.lock").exists()


def test_a_run_that_nobody_reads_goes_on_to_its_end() -> None:
    command = [sys.executable, "-m", "fedsim", "run", "tiny.yaml", "--out", "unread"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, "")
    assert Path("unread/model.safetensors").is_file()
    assert Path("unread/report.html").is_file()


@pytest.mark.parametrize("arguments", [["run", "tiny.yaml", "--out", "full"], ["scenarios"], ["schema"]])
def test_a_full_standard_output_is_called_that(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "fedsim", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output cannot be written: No space left on device; ")
    assert done.stderr.count("\n") == 1
    if arguments[0] == "run":
        assert Path("full/report.html").is_file()


def test_a_command_without_standard_output_runs() -> None:
    command = f"{sys.executable} -m fedsim run tiny.yaml --set rounds=1 --out closed >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("closed/report.html").is_file()
