# SPDX-License-Identifier: Apache-2.0
"""How the clients of a scenario protect themselves."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.scenario.numbers import SMALLEST, Delta, Part, Positive, Share
from fedsim.scenario.section import Section, shorthand


class _Noise(Section):
    clipping_norm: Annotated[float, Field(ge=SMALLEST, le=1e12)] = 1.0
    """The norm that everything is clipped to (L2; with Laplace noise L1)."""
    noise_multiplier: float | None = Field(None, ge=0, le=1e6)
    """Noise scale divided by the clipping norm; 0 clips only, and supports no claim."""
    target_epsilon: Annotated[float, Field(ge=1e-12, le=1e6)] | None = None
    """Find the smallest noise multiplier that spends at most this, in place of naming it."""
    delta: Delta = 1e-5
    """The delta of the claim; well below one over the number of units that are protected."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.noise_multiplier == 0 and self.target_epsilon is not None:
            raise ValueError("noise_multiplier 0 can never reach a finite target_epsilon; leave noise_multiplier out")
        if self.noise_multiplier is None and self.target_epsilon is None:
            raise ValueError("give exactly one of noise_multiplier and target_epsilon, here is neither")
        if self.noise_multiplier is not None and self.target_epsilon is not None:
            raise ValueError(
                "give exactly one of noise_multiplier and target_epsilon, here are both"
                f" ({self.noise_multiplier:g} and {self.target_epsilon:g}); leave one of them out"
            )
        return self


class ExampleDp(_Noise):
    """DP-SGD on the client (Abadi et al. 2016): each example's gradient is clipped, each step is noised."""

    batches: Literal["poisson", "shuffle"] = "poisson"
    """poisson: each example joins each batch independently, which is what amplification by sampling needs; shuffle:
    batches of an ordinary loader, accounted without amplification."""


class AdaptiveClipping(Section):
    """The clipping norm follows a quantile of the update norms (Andrew et al. 2021, Algorithm 1)."""

    quantile: Part = 0.5
    """The share of the updates that should be below the norm."""
    learning_rate: Annotated[float, Field(ge=SMALLEST, le=10)] = 0.2
    """Step of the geometric update of the norm."""
    bit_noise: Positive = 1.0
    """Standard deviation of the noise on a client's indicator bit (with secure aggregation: on the sum of the bits);
    the claim accounts for it."""


class ClientDp(_Noise):
    """The client clips and noises its whole update (fedavg) or gradient (fedsgd) before it leaves."""

    noise: Literal["gaussian", "laplace"] = "gaussian"
    """The distribution; laplace clips in L1."""
    adaptive: AdaptiveClipping | None = None
    """Let the clipping norm follow the norms; `clipping_norm` is where it starts. Gaussian only."""

    @model_validator(mode="after")
    def _adaptive_is_gaussian(self) -> Self:
        if self.adaptive is not None and self.noise != "gaussian":
            raise ValueError(
                f"adaptive clipping needs noise: gaussian, here it is {self.noise}; change it, or leave adaptive out"
            )
        return self


class Prune(Section):
    """Only the largest entries of the update are sent."""

    kind: Literal["prune"]
    """Top-k sparsification."""
    keep: Share = 0.1
    """The share of entries that is kept."""


class Quantise(Section):
    """Entries are rounded to a few levels between the smallest and the largest."""

    kind: Literal["quantise"]
    """Uniform quantisation."""
    bits: int = Field(8, ge=1, le=16)
    """2**bits levels."""


class Sign(Section):
    """Only signs are sent, scaled by the mean magnitude."""

    kind: Literal["sign"]
    """One bit for each entry (Bernstein et al. 2018)."""


Compression = Annotated[Prune | Quantise | Sign, Field(discriminator="kind")]


class DefenceSection(Section):
    """What the client does to protect itself, in this order: example_dp, client_dp, compression, secure aggregation."""

    example_dp: ExampleDp | None = None
    """Protects each example."""
    client_dp: ClientDp | None = None
    """Protects everything that a client holds."""
    compression: Annotated[Compression, shorthand("kind")] | None = None
    """Sends less. No privacy claim rests on it; after noise it is post-processing and costs none."""
    secure_aggregation: bool = False
    """The server sees the sum of a round only (as an access model). Clients then share the noise between them."""
    accountant: Literal["pld", "rdp", "prv"] = "pld"
    """pld: privacy loss distributions (dp-accounting), tight; rdp: Renyi moments; prv: Opacus, Gaussian only."""
    inspect_model: Literal["off", "warn", "refuse"] = "off"
    """Whether a client looks at the model that it is sent for weights that are made to leak: warn says so in its log,
    refuse does not train with it. Under a privacy claim it looks at the weights only, never at what they do to its
    data, because a refusal would tell. off, so that a scenario shows what the other defences do on their own."""
