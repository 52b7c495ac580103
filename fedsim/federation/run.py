# SPDX-License-Identifier: Apache-2.0
"""Run a scenario, and open a run again."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from flwr.app import Context, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedsim.errors import RunError
from fedsim.federation import checksums
from fedsim.federation.client import answer
from fedsim.federation.folder import create_folder, next_free_folder, tidy, write_durably
from fedsim.federation.inline import SERVER_NODE, InlineGrid
from fedsim.federation.plan import Plan, as_asked, plan, scenario_json, summary
from fedsim.federation.records import damaged, read_claims, read_json, read_rounds, read_summary, read_text
from fedsim.federation.server import Progress, server_app
from fedsim.federation.transcript import Transcript
from fedsim.federation.truth import write_truth
from fedsim.privacy import PrivacyClaim
from fedsim.scenario import EngineSection, Scenario
from fedsim.scenario_file import dump_scenario, load_scenario


class Run:
    """A run folder: what ran, what the server saw, what was spent."""

    def __init__(self, path: Path) -> None:
        if not (path / "scenario.yaml").is_file():
            raise RunError(f"{path} is not the folder of a run (scenario.yaml is missing); name one that is, see runs/")
        self.path = path

    def __repr__(self) -> str:
        state = "complete" if self.complete else "unfinished"
        return f"Run({str(self.path)!r}, {state})"

    @property
    def complete(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "model.safetensors").is_file()

    @cached_property
    def scenario(self) -> Scenario:
        """The scenario as it ran."""
        return load_scenario(self._checked("scenario.yaml"))

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a round, from the round 0 before training on.

        `epsilon`, `delta`, `unit`, `adjacency` and `observer` say what had been spent by then: the first claim, which
        is the one against the server. Further claims have the same columns with `_2`, `_3`, ...
        """
        file = self._checked("metrics.jsonl")
        rounds = read_rounds(file)
        if self.complete and not rounds:
            raise damaged(file, "it holds no round, but the run has ended")
        rows = [_flat(json.loads(line)) for line in read_text(file).split("\n")[: len(rounds)]] if rounds else []
        return pd.DataFrame(rows).set_index("round") if rows else pd.DataFrame()

    @cached_property
    def transcript(self) -> Transcript:
        """What the server saw."""
        for name in ("layout.json", "messages.jsonl"):
            self._checked(f"transcript/{name}")
        return Transcript(self.path / "transcript")

    @cached_property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """Every privacy claim that the run supports; the first is the one against the server."""
        return read_claims(self._checked("claims.json"))

    @property
    def claim(self) -> PrivacyClaim | None:
        """The privacy claim against the server, if there is one."""
        return self.claims[0] if self.claims else None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The data, the model and the clients in numbers."""
        file = self._checked("summary.json")
        if read_summary(file).population is None:
            raise damaged(file, "it is not the summary of a run")
        content: dict[str, Any] = read_json(file)
        return content

    @property
    def attacks(self) -> pd.DataFrame:
        """One row for each attack and update that it was played on, with its scores where the truth is known.

        `right`, `exact` and `leaked` are numbers of examples, of the `originals`; `psnr`, `ssim`, `cells_right`, ...
        are means over the originals.
        """
        rows = []
        for file in sorted((self.path / "attacks").glob("[0-9][0-9][0-9]-*.json")):
            content = read_json(self._checked(f"attacks/{file.name}"))
            with undamaged(file):
                for entry in content["observations"]:
                    numbers = _scores(entry.pop("score") or {})
                    rows.append({"attack": content["attack"], "file": file.name, **entry, **numbers})
        return pd.DataFrame(rows)

    def model(self) -> dict[str, torch.Tensor]:
        """The weights of the trained model."""
        if not self.complete:
            raise RunError(f"{self.path} is not finished; go on with it by fedsim run --resume {self.path}")
        file = self._checked(checksums.MODEL)
        try:
            weights: dict[str, torch.Tensor] = load_file(file)
        except (SafetensorError, OSError) as error:
            raise damaged(file, str(error)) from error
        return weights

    def _checked(self, name: str) -> Path:
        """A file of the run, which is as the run wrote it, where that is known."""
        checksums.check_file(self.path, name)
        return self.path / name


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics with its claims in columns."""
    if not isinstance(line, dict):
        raise TypeError(f"a line is {type(line).__name__}, not an object")
    claims = line.pop("privacy", None) or []
    for number, claim in enumerate(claims, start=1):
        ending = "" if number == 1 else f"_{number}"
        epsilon = float(claim["epsilon"])  # infinity is a text in JSON
        line |= {f"{name}{ending}": value for name, value in {**claim, "epsilon": epsilon}.items()}
    return line


def _scores(measured: dict[str, Any]) -> dict[str, Any]:
    """The numbers and words of a score: counts where it has shares, and every metric by its name."""
    plain = {name: value for name, value in measured.items() if isinstance(value, int | float | str)}
    shares = {name: value["right"] for name, value in measured.items() if isinstance(value, dict) and "of" in value}
    if "certified" in shares:
        shares["certified_right"] = shares.pop("certified")
    return {**plain, **shares, **measured.get("metrics", {})}


@contextmanager
def undamaged(path: Path) -> Iterator[Path]:
    """A file of a run; a RunError if what is in it is not what a run writes."""
    try:
        yield path
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); restore it from a backup, or run the scenario again") from error


def open_run(path: str | Path) -> Run:
    """The run in a folder."""
    return Run(Path(path))


def run(
    scenario: Scenario | str | Path,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run a scenario (an object, the name of a packaged one, or a file) to its end.

    The run folder is `out`, by default the next free `runs/NAME-001`. Nothing is written unless the plan is sound.
    """
    if not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario, overrides)
    scenario = _with_absolute_path(scenario)
    planned = plan(scenario)
    _check_engine(scenario.engine)
    path = Path(out) if out is not None else next_free_folder(Path("runs"), scenario.name)
    create_folder(
        path,
        {
            "scenario.yaml": dump_scenario(scenario),
            "summary.json": _summary_text(planned),
            "claims.json": json.dumps([claim.to_dict() for claim in _first_claims(planned)], indent=1) + "\n",
        },
    )
    return _go_on(scenario, path, progress)


def _first_claims(planned: Plan) -> Sequence[PrivacyClaim]:
    """What a run will have spent; of a deployment nobody knows that before its clients are asked: nothing so far."""
    return (as_asked(planned, [], 0) if planned.scenario.engine.kind == "deploy" else planned).claims


def resume(path: str | Path, *, progress: Progress | None = None) -> Run:
    """Go on with a run that was interrupted, to the same end that it would have had."""
    unfinished = Run(Path(path))
    _mend_summary(unfinished)
    if unfinished.complete:
        tidy(unfinished.path)
        return unfinished
    return _go_on(unfinished.scenario, unfinished.path, progress)


def _mend_summary(run: Run) -> None:
    """Write a summary that is damaged or missing again: it follows from the scenario and the data."""
    try:
        run.summary  # noqa: B018 - reading it is the test
    except RunError:
        write_durably(run.path / "summary.json", _summary_text(plan(run.scenario)).encode())


def _summary_text(planned: Plan) -> str:
    return json.dumps(summary(planned), indent=1) + "\n"


def _go_on(scenario: Scenario, path: Path, progress: Progress | None) -> Run:
    planned = plan(scenario)
    if scenario.engine.kind == "deploy":
        from fedsim.federation.deployed import run_deployed

        run_deployed(planned, path, progress)  # where real clients' data is, there is no ground truth to write
        return Run(path)
    write_truth(planned, path / "truth")
    with _threads(scenario.engine.threads), _settled_objects():
        if scenario.engine.kind == "ray":
            from fedsim.federation.ray import run_on_ray

            run_on_ray(planned, path, progress)
        else:
            _run_inline(planned, path, progress)
    return Run(path)


def _check_engine(engine: EngineSection) -> None:
    """What an engine needs and does not find, before anything is written."""
    if engine.kind == "ray":
        from fedsim.federation.ray import check_ray

        check_ray(engine)
    elif engine.kind == "deploy":
        from fedsim.federation.link import check_link

        check_link(engine)


def _run_inline(planned: Plan, path: Path, progress: Progress | None) -> None:
    configuration: dict[str, str | int | float | bool] = {"scenario": scenario_json(planned.scenario)}
    grid = InlineGrid(planned.population, answer, configuration)
    context = Context(1, SERVER_NODE, {}, RecordDict(), {**configuration, "folder": str(path)})
    server_app(progress)(grid, context)


def _with_absolute_path(scenario: Scenario) -> Scenario:
    """The same scenario with its paths made absolute, so that a run can be resumed from any folder."""
    changes: dict[str, Any] = {}
    if (path := getattr(scenario.data, "path", None)) is not None:
        changes["data"] = scenario.data.model_copy(update={"path": str(Path(path).absolute())})
    if (file := scenario.engine.root_certificates) is not None:
        changes["engine"] = scenario.engine.model_copy(update={"root_certificates": str(Path(file).absolute())})
    return scenario.model_copy(update=changes) if changes else scenario


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _settled_objects() -> Iterator[None]:
    """Spare Python's garbage collector the objects that are here before a run: a million, most of them of PyTorch.

    It walked over all of them again and again as a round's messages were made: an eighth of a round of small models.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
