# SPDX-License-Identifier: Apache-2.0
"""Play the attacks of a scenario on the transcript of its run, score them, and write both down.

    RUN/attacks/001-exact.json                 what was known, what was found, how good it is
    RUN/attacks/001-exact.safetensors          the reconstructions
    RUN/attacks/001-exact-truth.safetensors    the originals, for scoring and for the report; in simulation only

The attack is given the transcript and the scenario's knowledge. The truth is read after it has answered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.attacks import attack_named
from fedsim.attacks.evidence import knowledge_of, knowledge_table, observations, with_labels
from fedsim.attacks.observation import Knowledge, Observation, Reconstruction
from fedsim.audit.reconstruction import MOST_PRIOR_ROWS, ReconstructionScore, score
from fedsim.audit.scores.columns import columns_to_list
from fedsim.data.table import TableEncoding
from fedsim.errors import AttackError, RunError
from fedsim.federation.checksums import check_file, check_transcript, note_files
from fedsim.federation.client import Workplace, workplace
from fedsim.federation.plan import scenario_json
from fedsim.federation.run import Run
from fedsim.federation.transcript import write_json
from fedsim.scenario import AttackSection, AutomaticAttack, FedAvgAttack, Scenario

AT_ONCE = 8  # clients that are attacked as replicas of one computation


@dataclass(frozen=True)
class AttackReport:
    """One attack on one update, as it goes on."""

    attack: str
    number: int
    of: int
    observation: str
    done: bool = False
    returned: int = 0
    """Items that the attack gave back, right or wrong."""
    loss: float | None = None
    score: ReconstructionScore | None = None
    """How good they are, where the truth is known."""
    error: str = ""


Progress = Callable[[AttackReport], None]


@dataclass(frozen=True, eq=False)
class Battle:
    """A run, the scenario with the attacks and the knowledge that are tried on it, and the data for scoring."""

    run: Run
    scenario: Scenario
    place: Workplace


def attack_run(
    run: Run, scenario: Scenario | None = None, *, again: bool = True, progress: Progress | None = None
) -> list[Path]:
    """Play attacks on a run; the files with their results.

    The attacks and the adversary's knowledge are those of `scenario`, by default the run's own; one without attacks is
    attacked by the automatic one. Without `again` what was already played with the same settings is left as it is.
    """
    scenario = scenario or run.scenario
    battle = Battle(run, scenario, workplace(scenario_json(run.scenario)))
    if (run.path / "attacks").exists() and not (run.path / "attacks").is_dir():
        raise RunError(
            f"{run.path / 'attacks'} is in the way: results are written to a folder of that name; move it away"
        )
    check_transcript(run.path)
    paths = []
    for settings in scenario.attacks or (AutomaticAttack(),):
        path, played = _place(run.path / "attacks", _plain(scenario, settings))
        if again or not played:
            _play(battle, settings, path, progress or (lambda report: None))
        paths.append(path)
    return paths


def _place(folder: Path, settings: dict[str, Any]) -> tuple[Path, bool]:
    """Where the results of these settings belong, and whether they are there: the same settings keep their number."""
    taken = sorted(folder.glob("[0-9][0-9][0-9]-*.json")) if folder.is_dir() else []
    for path in taken:
        try:
            same = json.loads(path.read_bytes())["settings"] == settings
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise RunError(
                f"{path} is damaged: it is not the result of an attack; remove it and attack again"
            ) from error
        if same:
            return path, True
    number = 1 + max((int(path.name[:3]) for path in taken), default=0)
    return folder / f"{number:03d}-{settings['name']}.json", False


def _plain(scenario: Scenario, settings: AttackSection) -> dict[str, Any]:
    return {**settings.model_dump(mode="json"), "knows": scenario.adversary.knows.model_dump(mode="json")}


def _play(battle: Battle, settings: AttackSection, path: Path, progress: Progress) -> None:
    run, scenario, place = battle.run, battle.scenario, battle.place
    seen = list(islice(observations(run.transcript, scenario, place.model), settings.observations))
    if not seen:
        raise AttackError(
            f"{run.path} keeps no update to attack; raise adversary.keep_rounds and keep_clients and run again"
        )
    cases = [_case(battle, rounds) for rounds in _by_client(seen, settings)]
    called = getattr(settings, "title", None) or settings.name
    found: dict[str, Tensor] = {}
    truth: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    for some in batched(cases, AT_ONCE if settings.name == "fedavg" else 1):
        for number, case in enumerate(some, len(entries) + 1):
            progress(AttackReport(called, number, len(cases), case.key))
        for case, result in zip(some, _results(settings, some, scenario.seed), strict=True):
            entry = _entry(battle, settings, case, result, found, truth)
            entries.append(entry)
            measured = ReconstructionScore.from_dict(entry["score"]) if entry["score"] else None
            outcome = (True, entry["found"], entry["loss"], measured, entry["error"] or "")
            progress(AttackReport(called, len(entries), len(cases), case.key, *outcome))
    if all(entry["error"] for entry in entries):
        raise AttackError(f"{settings.name} cannot be played on this run: {entries[0]['error']}")
    knowledge, encoding = knowledge_of(scenario, place.dataset, seen[0]), place.dataset.encoding
    document = {
        "attack": settings.name,
        "settings": _plain(scenario, settings),
        "knowledge": knowledge_table(scenario, seen[0], knowledge),
        "kind": place.dataset.kind,
        **({"columns": columns_to_list(encoding)} if isinstance(encoding, TableEncoding) else {}),
        "observations": entries,
    }
    path.parent.mkdir(exist_ok=True)
    _save(path.with_suffix(".safetensors"), found)
    truth_path = path.with_name(f"{path.stem}-truth.safetensors")
    truth_path.unlink(missing_ok=True)  # that of an earlier time
    if truth:
        _save(truth_path, truth)
    write_json(path, document)
    note_files(run.path, (path, path.with_suffix(".safetensors"), truth_path))


@dataclass(frozen=True, eq=False)
class Case:
    """What is attacked at once: an update, or several of one client; and which rows of the data are behind it."""

    observations: Sequence[Observation]
    knowledge: Knowledge
    rows: Tensor | None

    @property
    def key(self) -> str:
        """Names its tensors in the result files."""
        first = self.observations[0]
        return f"round-{first.round}/" + ("sum" if first.client is None else f"client-{first.client}")


def _by_client(seen: Sequence[Observation], settings: AttackSection) -> list[list[Observation]]:
    """Each update for itself, or all of a client together."""
    if getattr(settings, "rounds", "each") == "each":
        return [[observation] for observation in seen]
    clients: dict[int | None, list[Observation]] = {}
    for observation in seen:
        clients.setdefault(observation.client, []).append(observation)
    return list(clients.values())


def _case(battle: Battle, rounds: Sequence[Observation]) -> Case:
    scenario, dataset = battle.scenario, battle.place.dataset
    knowledge = knowledge_of(scenario, dataset, rounds[0])
    rows = _true_rows(battle.run, rounds[0], len(dataset.x_train))
    if scenario.adversary.knows.labels == "known" and rows is not None:
        knowledge = with_labels(knowledge, dataset.y_train[rows])
    return Case(rounds, knowledge, rows)


def _results(settings: AttackSection, cases: Sequence[Case], seed: int) -> list[Reconstruction | AttackError]:
    """What the attack finds; an update that resists is a failure of the attack, and is counted as one."""
    try:
        if isinstance(settings, FedAvgAttack):
            from fedsim.attacks.fedavg import fedavg_clients

            pairs = [(case.observations, case.knowledge) for case in cases]
            found = list(fedavg_clients(pairs, settings, seed=seed))
        else:
            first = cases[0]
            found = [attack_named(settings.name)(first.observations[0], first.knowledge, settings, seed=seed)]
        return [_judged(settings, case, result, seed) for case, result in zip(cases, found, strict=True)]
    except AttackError as error:
        if len(cases) == 1:
            return [error]
        return [result for case in cases for result in _results(settings, [case], seed)]


def _judged(settings: AttackSection, case: Case, result: Reconstruction, seed: int) -> Reconstruction:
    """With a calibrated confidence of the images, or a note that there is none."""
    from fedsim.attacks.shadow_images import judged

    first, shadows = case.observations[0], getattr(settings, "shadows", 0)
    attack = attack_named(settings.name)
    return judged(attack, result, first, case.knowledge, settings, shadows=shadows, seed=seed)


def _entry(
    battle: Battle,
    settings: AttackSection,
    case: Case,
    result: Reconstruction | AttackError,
    found: dict[str, Tensor],
    truth: dict[str, Tensor],
) -> dict[str, Any]:
    """Score what was found in an update, if its truth is known; the entry of the result file."""
    dataset, observation, key = battle.place.dataset, case.observations[0], case.key
    knowledge, rows = case.knowledge, case.rows
    entry: dict[str, Any] = {"round": observation.round, "client": observation.client, "key": key, "error": None}
    if isinstance(result, AttackError):
        entry["error"] = str(result)
        result = _nothing(settings.name, knowledge)
    for name, tensor in _tensors(result).items():
        found[f"{key}/{name}"] = tensor
    measured = None
    if rows is not None:
        originals, labels = dataset.x_train[rows], dataset.y_train[rows]
        measured = score(
            result,
            originals,
            labels,
            knowledge,
            claims=battle.run.claims,
            prior=dataset.x_test,
            prior_labels=dataset.y_test,
            others=_other_rows(dataset.x_train, rows),
            clients=observation.clients,
            client=observation.client,
        )
        truth[f"{key}/inputs"], truth[f"{key}/labels"] = originals.contiguous(), labels.contiguous()
        truth[f"{key}/assignment"] = torch.tensor(measured.assignment, dtype=torch.int64)
    return entry | {
        "found": len(result.inputs),
        "loss": result.loss if math.isfinite(result.loss) else None,
        "certified": int(result.certified.sum()) if result.certified is not None else None,
        "label_counts": result.label_counts.tolist() if result.label_counts is not None else None,
        "event": result.event,
        "notes": list(result.notes),
        "tried": list(result.tried),
        "untried": list(result.untried),
        "score": measured.to_dict() if measured is not None else None,
    }


def _other_rows(x_train: Tensor, rows: Tensor) -> Tensor:
    """The first training rows that an update was not computed from, as many as scoring looks at."""
    others = torch.ones(len(x_train), dtype=torch.bool)
    others[rows] = False
    return x_train[others.nonzero().flatten()[:MOST_PRIOR_ROWS]]


def batched(cases: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    """The cases in groups of `size`."""
    return (cases[first : first + size] for first in range(0, len(cases), size))


def _nothing(attack: str, knowledge: Knowledge) -> Reconstruction:
    return Reconstruction(attack, torch.empty(0, *knowledge.input_shape), None, math.nan, torch.empty(0))


def _true_rows(run: Run, observation: Observation, known: int) -> Tensor | None:
    """The rows of the training data behind an update, each once; None where nobody knows (a deployed federation)."""
    path = run.path / "truth" / f"round-{observation.round:05d}.safetensors"
    if not path.is_file():
        return None
    check_file(run.path, f"truth/{path.name}")
    wanted = None if observation.client is None else f"client-{observation.client}/rows"
    try:
        with safe_open(path, framework="pt") as tensors:
            keys = [key for key in tensors.keys() if (key == wanted if wanted else key.endswith("/rows"))]  # noqa: SIM118
            found = [tensors.get_tensor(key) for key in sorted(keys)]
    except SafetensorError as error:
        raise RunError(f"{path} is damaged ({error}); remove it to attack without scores") from error
    if not found:
        return None
    rows = torch.cat(found) if observation.kind == "gradient" else torch.cat(found).unique()
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < known:
        raise RunError(f"{path} names rows that the data does not have; was the data file changed since the run?")
    return rows


def _tensors(result: Reconstruction) -> dict[str, Tensor]:
    named = {
        "inputs": result.inputs,
        "score": result.score,
        "confidence": result.confidence,
        "labels": result.labels,
        "cells": result.cells,
        "certified": result.certified.to(torch.uint8) if result.certified is not None else None,
        "radius": result.radius,
    }
    return {name: tensor.detach().contiguous() for name, tensor in named.items() if tensor is not None}


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)
