# SPDX-License-Identifier: Apache-2.0
"""What a deployed client has of its own, and trusts more than the server: policy, ledger, data, randomness.

They come from the configuration of its own node (`flower-supernode --node-config`), which no message can change. A
simulated client has none of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedsim.errors import DeployError, FedsimError, PolicyError
from fedsim.federation.asked import Rows
from fedsim.federation.masking import MOST_HOLDERS
from fedsim.federation.policy import Policy, Request, charge_request, check_request, check_scenario, load_policy
from fedsim.federation.signature import check_signature, counted_rows, read_public
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.secure_noise import add_secure_noise, secure_generator
from fedsim.randomness import ClientRandomness
from fedsim.scenario import Scenario

SOURCES = {"csv": "csv", "csv.gz": "csv", "npz": "npz", "txt": "text", "json": "text", "json.gz": "text"}
"""What a file of a client's own can be, by the end of its name."""
SIMULATED = "FEDSIM_SIMULATED"
"""Set to 1 in the environment of simulated clients that Flower starts, which cannot be told so otherwise."""


@dataclass(frozen=True)
class Safeguards:
    """The safeguards of one client in one run."""

    run: str
    clients: int
    policy: Path | None
    ledger: Path | None
    data_path: str | None
    server_key: Path | None = None
    """The public key of the server, which `fedsim deploy client` always names; without it nothing is checked."""

    @classmethod
    def of(cls, context: Context) -> Safeguards | None:
        """Those that the node's configuration names; None for a simulated client.

        A client is simulated only if its own side says so. Whoever starts a node and says nothing gets noise of the
        operating system: the seed of a scenario is known to the server.
        """
        config = context.node_config
        own = any(key in config for key in ("policy", "ledger", "data-path", "server-key"))
        if not own and (config.get("simulated") or os.environ.get(SIMULATED) == "1"):
            return None
        named = ("policy", "ledger", "server-key")
        policy, ledger, key = (Path(str(config[name])) if name in config else None for name in named)
        data_path = str(config["data-path"]) if "data-path" in config else None
        return cls(str(context.run_id), int(config.get("num-partitions", 1)), policy, ledger, data_path, key)

    def believe(self, message: Message, context: Context) -> None:
        """PolicyError for a message that is not the server's, or that this client has had before.

        Nothing is done with a message before this, and it is written into the ledger first: one that comes twice, from
        whomever, is answered once.
        """
        if self.server_key is None:
            return
        number = check_signature(message, context.run_id, context.node_id, self._server_key())
        if self.ledger is not None and not Ledger(self.ledger, create=False).first_time(self.run, f"message {number}"):
            raise PolicyError("this client has had this message before, and answers it once")

    def _server_key(self) -> Ed25519PublicKey:
        try:
            return read_public(Path(self.server_key or "").read_bytes())
        except (OSError, DeployError) as error:
            logging.getLogger("fedsim").error("%s: %s", self.server_key, error)
            raise PolicyError("this client cannot read its server's key, so it answers nobody") from error

    def vouched(self) -> Rows | None:
        """Between which numbers of rows this client trains, as its policy says and enforces."""
        return self._policy().rows if self.policy is not None else None

    def admit(self, scenario: Scenario) -> None:
        """PolicyError for a scenario for which not even a file is opened: what it asks for shows without the data."""
        policy, data = self._policy(), scenario.data
        check_scenario(policy, scenario, protected=self.policy is not None)
        if self.data_path is not None:
            self._admit_own_data(policy, data.source)
        if self.data_path is None and (data.source == "hub" or getattr(data, "path", None) is not None):
            raise PolicyError(
                f"data.source {data.source} names data that a server chose; this client reads only what its own"
                " data-path names, or data that comes with fedsim"
            )

    def _admit_own_data(self, policy: Policy, source: str) -> None:
        """What an example is, the owner's file decides and not the server; how numbers are scaled must be public."""
        path = Path(self.data_path or "")
        own = "images" if path.is_dir() else SOURCES.get(path.name.split(".", 1)[-1].lower())
        if source != own:
            raise PolicyError(
                f"data.source {source} is not what this client holds; ask for {own or 'a kind of file that it has'}"
            )
        if source in ("csv", "text") and not policy.public_encoding:
            raise PolicyError(
                f"data.source {source} is scaled and numbered by the client's own rows, which no noise covers; ask for"
                " npz, for which its owner can encode a table by a schema, or have it declare public_encoding"
            )

    def check(self, scenario: Scenario, content: RecordDict, model: Tensor, examples: int) -> None:
        """PolicyError for whatever the client's policy does not allow."""
        request = request_of(scenario, content.config_records["config"], model.numel(), examples)
        request = replace(request, counted=counted_rows(content))
        if self.policy is not None:
            check_request(self._policy(), scenario, request)

    def charge(self, scenario: Scenario, config: ConfigRecord, model: Tensor, examples: int) -> None:
        """Write down what this round's release spends, durably, before anything is computed; or refuse."""
        if self.ledger is None:
            return
        request = request_of(scenario, config, model.numel(), examples)
        charge_request(self._policy(), Ledger(self.ledger, create=False), scenario, request, self.run)

    def check_holders(self, holders: object, what: str) -> None:
        """PolicyError for what are not enough numbers of clients, each once.

        The share of holder −1 would be the secret itself, and who stands there twice would be two of a threshold. How
        many clients there are by now this one does not know: others may have joined after it.
        """
        numbers = holders if isinstance(holders, list) else []
        whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
        if not whole or not all(0 <= number < MOST_HOLDERS for number in numbers):
            raise PolicyError("the server names holders that are no clients, which are numbered from 0")
        if len(set(numbers)) != len(numbers):
            raise PolicyError("the server names a client twice among those of a sum")
        if len(numbers) < (least := self._policy().smallest_cohort):
            raise PolicyError(f"the server would {what} {len(numbers)} clients, smallest_cohort is {least}")

    def answer_once(self, what: str) -> None:
        """Write down, durably, that something is going to be answered; PolicyError, if it was already."""
        if self.ledger is None:
            raise PolicyError("secure aggregation needs a ledger, which shows that masks are used once; name one")
        if not Ledger(self.ledger, create=False).first_time(self.run, what):
            raise PolicyError(
                "the server asks again for what this client has answered in secure aggregation; its masks are used"
                " once, so it takes part again in the next attempt only"
            )

    def inspection(self) -> Literal["refuse", "warn"]:
        """What is done with a model that looks made to leak; the server has no say in it."""
        return self._policy().inspect_model

    def largest_model(self) -> int:
        """Bytes of a model, at most."""
        return self._policy().largest_message

    def _policy(self) -> Policy:
        """The owner's policy, or the strict default. What is wrong with the file is the owner's business alone."""
        try:
            return load_policy(self.policy) if self.policy is not None else Policy()
        except PolicyError as error:
            logging.getLogger("fedsim").error("%s", error)
            raise PolicyError(
                "this client's policy cannot be read, so it takes no part; its own log says why"
            ) from error


def request_of(scenario: Scenario, config: ConfigRecord, parameters: int, examples: int) -> Request:
    """What a message asks of this client, for its policy and its ledger."""
    defence = scenario.defence
    return Request(
        round=int(number(config, "server-round")),
        example_noise=number(config, "example-noise-multiplier") if defence.example_dp is not None else None,
        client_noise=number(config, "client-noise-multiplier") if defence.client_dp is not None else None,
        clipping_norm=number(config, "clipping-norm") if defence.client_dp is not None else 0.0,
        model_bytes=4 * parameters,
        examples=examples,
        sharing=max(1, int(number(config, "cohort-size"))) if _shares_noise(scenario) else 1,
    )


def _shares_noise(scenario: Scenario) -> bool:
    return scenario.defence.client_dp is not None and scenario.defence.secure_aggregation


def number(config: ConfigRecord, key: str) -> float:
    """A number of the server's configuration."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FedsimError(f"the server sent {key} {value!r}, which is not a number")
    return float(value)


@dataclass(frozen=True)
class SystemRandomness(ClientRandomness):
    """Randomness of the operating system: batches that the server cannot guess, noise without gaps and without seed."""

    @property
    def add_noise(self) -> Callable[[Any, float, float], Any]:
        """Gaussian noise on a grid, exact in floating point."""
        return add_secure_noise

    def batches(self) -> np.random.Generator:
        """Which examples go into which batch: amplification by sampling rests on their secrecy."""
        return secure_generator()

    def noise_key(self) -> bytes:
        """Not used: see add_noise."""
        return os.urandom(16)

    def client_noise(self) -> np.random.Generator:
        """Not drawn from: see add_noise."""
        return secure_generator()
