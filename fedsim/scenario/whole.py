# SPDX-License-Identifier: Apache-2.0
"""The whole scenario, and what its parts must not ask for together."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.scenario.active import ActiveSection
from fedsim.scenario.attack import AttackSection, KnowledgeSection
from fedsim.scenario.audit import LANGUAGE_GAMES, AuditSection, GameAudit
from fedsim.scenario.clients import ClientSection, CohortSection, FedAvgStrategy, FedSgdStrategy, StrategySection
from fedsim.scenario.data import (
    DataSection,
    DescriptionsData,
    EmbeddedData,
    IidPartition,
    PartitionSection,
    TextData,
)
from fedsim.scenario.defence import DefenceSection
from fedsim.scenario.model import MlpModel, ModelSection
from fedsim.scenario.numbers import Count, CountOrZero, Seed
from fedsim.scenario.section import Section, shorthand


class AdversarySection(Section):
    """What the server keeps of what it sees. Whatever is not kept is still counted, with its norm."""

    keep_rounds: Literal["all"] | CountOrZero | tuple[CountOrZero, ...] = "all"
    """Rounds whose tensors are written to the transcript: all, the first n, or a list."""
    keep_clients: Literal["all"] | CountOrZero | tuple[CountOrZero, ...] = "all"
    """Clients whose updates are written: all, the first n of each cohort, or a list of clients."""
    knows: KnowledgeSection = KnowledgeSection()
    """What its attacks may use beside what it sees."""
    active: Annotated[ActiveSection, shorthand("kind")] | None = None
    """null: the server is curious but honest. Otherwise it sends weights that are made to leak."""


class EngineSection(Section):
    """Where the clients run. The result does not depend on it."""

    kind: Literal["inline", "ray", "deploy"] = "inline"
    """inline: in this process, a whole cohort at once; ray: on the cores of this machine or of a Ray cluster (extra
    `ray`); deploy: on the machines whose SuperNodes are connected to a Flower SuperLink."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Threads of the mathematics; null: as many as there are cores."""
    chunk: Count | None = None
    """Clients that are trained at once; null: as many as fit the cache."""
    address: str | None = None
    """deploy: host:port of the SuperLink, null: 127.0.0.1:8000; ray: of an existing cluster, null: this machine."""
    root_certificates: str | None = None
    """deploy: the file of the certificate authority that signed the SuperLink's certificate; null: no TLS, which is
    allowed on this machine only."""
    client_cpus: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """ray: cores that one client takes; as many clients train at once as fit."""


class Scenario(Section):
    """Everything that decides a run."""

    name: str = Field("scenario", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """Names the run folder."""
    question: str = ""
    """The question that the scenario answers, in a sentence."""
    data: Annotated[DataSection, shorthand("source")] = EmbeddedData(source="mnist")
    """The data."""
    partition: Annotated[PartitionSection, shorthand("kind")] = IidPartition()
    """How the rows are divided among the clients."""
    model: Annotated[ModelSection, shorthand("name")] = MlpModel(name="mlp")
    """The model."""
    strategy: Annotated[StrategySection, shorthand("name")] = FedAvgStrategy()
    """What the server does."""
    client: ClientSection = ClientSection()
    """What a client does."""
    cohort: CohortSection = CohortSection()
    """Who takes part."""
    rounds: int = Field(10, ge=1, le=1_000_000)
    """Rounds of training."""
    defence: DefenceSection = DefenceSection()
    """How the clients protect themselves."""
    adversary: AdversarySection = AdversarySection()
    """What the server keeps."""
    attacks: tuple[AttackSection, ...] = ()
    """Attacks to play on the transcript."""
    audit: tuple[AuditSection, ...] = ()
    """Audits of the privacy claim, for `fedsim audit`."""
    evaluate_every: Count = 1
    """Evaluate the model on held-out data after every so many rounds, and after the last."""
    engine: Annotated[EngineSection, shorthand("kind")] = EngineSection()
    """Where it runs."""
    seed: Seed = 0
    """All randomness of the simulation comes from this number."""

    @property
    def is_text(self) -> bool:
        """Whether the model learns a language."""
        return isinstance(self.data, DescriptionsData | TextData)

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        checks = (
            _fedsgd_has_one_step,
            _uniform_under_client_privacy,
            _no_batch_norm_under_privacy,
            _attacked_rounds_exist,
            _kept_rounds_exist,
            _games_fit_the_data,
        )
        for check in checks:
            check(self)
        return self


def _fedsgd_has_one_step(scenario: Scenario) -> None:
    local = scenario.client.model_fields_set - {"batch_size", "shuffle"}
    if isinstance(scenario.strategy, FedSgdStrategy) and local:
        raise ValueError(
            f"client.{sorted(local)[0]} has no meaning with strategy fedsgd, where a client sends one gradient;"
            " leave it out, or use strategy.server_learning_rate and client.batch_size"
        )


def _uniform_under_client_privacy(scenario: Scenario) -> None:
    if scenario.defence.client_dp and scenario.strategy.weighting == "examples":
        raise ValueError(
            "strategy.weighting examples lets one client outweigh the clipping norm, so no client-level claim holds;"
            " use uniform"
        )


def _no_batch_norm_under_privacy(scenario: Scenario) -> None:
    private = scenario.defence.example_dp or scenario.defence.client_dp
    if private and getattr(scenario.model, "norm", None) == "batch":
        raise ValueError(
            "model.norm batch mixes the examples of a batch and sends statistics that are not noised;"
            " use norm: group with a privacy claim"
        )


def _attacked_rounds_exist(scenario: Scenario) -> None:
    active = scenario.adversary.active
    if active is not None and max(active.rounds, default=0) > scenario.rounds:
        raise ValueError(
            f"adversary.active.rounds names round {max(active.rounds)}, but the scenario has {scenario.rounds};"
            " name one of them"
        )


def _kept_rounds_exist(scenario: Scenario) -> None:
    """A list that names what never comes would keep less than is meant, and nobody would see it before the attack."""
    keep = scenario.adversary.keep_rounds
    if isinstance(keep, tuple) and (strange := [round_ for round_ in keep if not 1 <= round_ <= scenario.rounds]):
        last = "is round 1" if scenario.rounds == 1 else f"are rounds 1 to {scenario.rounds:,}"
        raise ValueError(
            f"adversary.keep_rounds names round {strange[0]}, but there {last}; name those only, or change rounds"
        )


def _games_fit_the_data(scenario: Scenario) -> None:
    for audit in scenario.audit:
        if isinstance(audit, GameAudit) and (audit.game in LANGUAGE_GAMES) != scenario.is_text:
            found, fitting = ("text", "RC-Targ") if scenario.is_text else ("no text", "MI")
            raise ValueError(
                f"audit.game {audit.game} does not fit data {scenario.data.source}, which is {found}; play {fitting}"
            )
