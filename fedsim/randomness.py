# SPDX-License-Identifier: Apache-2.0
"""One scenario seed, and a stream of random numbers for every purpose.

Every random choice of a simulation draws from the stream named by what it is for, `(seed, purpose, round, client)`, so
that neither the order of execution, nor the engine, nor the size of a cohort can change a result.

Noise that protects a real person is the exception: a deployed client takes it from its operating system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """The generator named `(seed, purpose, *ids)`: equal names give equal numbers, different names independent ones.

    The name is hashed (BLAKE2b) into the initial state of an SFC64 generator.
    """
    name = _Name(_name(seed, purpose, *ids))
    return np.random.Generator(np.random.SFC64(name))  # type: ignore[arg-type] # numpy's stubs lack the interface


def key(seed: int, purpose: str, *ids: int) -> bytes:
    """The key of a cipher, 128 bits, named in the same way."""
    return hashlib.blake2b(_name(seed, purpose, *ids), digest_size=16).digest()


def _name(seed: int, purpose: str, *ids: int) -> bytes:
    return ":".join([str(seed), purpose, *map(str, ids)]).encode()


class _Name(ISeedSequence):
    """Seeds a generator by the hash of a name, four times faster than NumPy's own mixing of a seed."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """The first `n_words` words of the hash."""
        size = n_words * np.dtype(dtype).itemsize
        return np.frombuffer(hashlib.blake2b(self._name, digest_size=size).digest(), dtype=dtype)


@dataclass(frozen=True)
class ClientRandomness:
    """The randomness of one client in one round of a simulation."""

    seed: int
    round: int
    client: int

    @property
    def add_noise(self) -> Callable[[Any, float, float], Any] | None:
        """(sum, noise multiplier, clipping norm) -> noisy sum: how a real client adds noise, which no seed gives."""
        return None

    def batches(self) -> np.random.Generator:
        """Which examples go into which batch."""
        return stream(self.seed, "batches", self.round, self.client)

    def noise_key(self) -> bytes:
        """The key of the stream of noise that is added to the steps of local DP-SGD."""
        return key(self.seed, "noise", self.round, self.client)

    def client_noise(self) -> np.random.Generator:
        """The noise that the client adds to its whole update."""
        return stream(self.seed, "client-noise", self.round, self.client)
