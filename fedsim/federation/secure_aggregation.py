# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation for real: the server gets the sum of the clients' vectors, and masked vectors that tell nothing.

The protocol of Bonawitz et al. 2017 (Figure 4, without the parts against a server that forges messages), in four waves:

1. keys     every client sends two fresh public keys
2. shares   every client splits its mask key s and its own mask seed b into shares, one for each other client, sealed
            for it; the server passes them on and cannot read them
3. vectors  y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)  mod 2⁶⁴
4. unmask   of who sent a vector the others give their shares of b, of who did not those of s; never both of one client

Guarantee: a server that follows the protocol, together with fewer than `threshold` clients, learns the sum over the
others and nothing else; up to n − threshold clients may drop out at any moment. Not covered: a server that lies about
who is there, or puts keys of its own in place of the clients' (that needs signatures by keys that clients know of each
other), and a client that adds nonsense to the sum, which nobody can see.

Flower's own SecAgg+ (1.41) cannot be used: its workflow refuses every context but the `LegacyContext` of the old
Strategy and its FitIns and FitRes, and its client half is not among the mods of the Message API.

Here are the two halves as pure functions of what arrives; `secure_rounds` carries the messages.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsim.federation.masking import Words, agree, combine, mask, new_key, public_key, seal, split, unseal

Keys = tuple[bytes, bytes]
"""The public keys of a client: for sealing shares, and for masks."""


def threshold_of(clients: int, *, all_needed: bool) -> int:
    """How many must stay: more than half; or everybody, where each adds a share of the noise that protects them."""
    return clients if all_needed else clients // 2 + 1


# --- a client's half ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Secrets:
    """What a client keeps to itself in one round."""

    client: int
    sealing: bytes
    masking: bytes
    seed: bytes

    @classmethod
    def new(cls, client: int) -> Secrets:
        """Fresh ones: keys of an earlier round would let sums be subtracted."""
        return cls(client, new_key(), new_key(), secrets.token_bytes(32))

    @property
    def keys(self) -> Keys:
        """The public keys."""
        return public_key(self.sealing), public_key(self.masking)

    @property
    def commitment(self) -> bytes:
        """By which the server sees whether it has put the seed together rightly."""
        return hashlib.sha256(self.seed).digest()


def sealed_shares(own: Secrets, keys: Mapping[int, Keys], threshold: int, label: str) -> dict[int, bytes]:
    """For every client, itself too: its shares of this client's mask key and seed, sealed for it."""
    _check_keys(own, keys, threshold)
    of_key = split(own.masking, list(keys), threshold)
    of_seed = split(own.seed, list(keys), threshold)
    return {
        other: seal(_sealing_key(own, keys, other), of_key[other] + of_seed[other], _label(label, own.client, other))
        for other in keys
    }


def masked(own: Secrets, keys: Mapping[int, Keys], words: Words) -> Words:
    """y_u: the vector, with its own mask and one for each other client, which cancels in the sum."""
    total: Words = words + mask(own.seed, len(words))
    for other, (_, public) in keys.items():
        if other != own.client:
            total = _add_pair_mask(total, own.masking, public, own.client, other)
    return total


def unmasking(
    own: Secrets, keys: Mapping[int, Keys], shares: Mapping[int, bytes], arrived: set[int], threshold: int, label: str
) -> dict[int, bytes]:
    """The shares that the server needs: of the seed of who arrived, of the mask key of who did not. Never both."""
    if own.client not in arrived or not arrived <= set(shares) or len(arrived) < threshold:
        raise ValueError(
            f"the server asks to unmask the sum of {len(arrived)} clients, at least {threshold} of its own round are"
            " needed"
        )
    revealed = {}
    for other, sealed in shares.items():
        content = unseal(_sealing_key(own, keys, other), sealed, _label(label, other, own.client))
        half = len(content) // 2
        revealed[other] = content[half:] if other in arrived else content[:half]
    return revealed


def _check_keys(own: Secrets, keys: Mapping[int, Keys], threshold: int) -> None:
    if keys.get(own.client) != own.keys:
        raise ValueError("the server does not pass this client's own keys on")
    different = {public for pair in keys.values() for public in pair}
    if len(keys) < max(2, threshold) or len(different) != 2 * len(keys):
        raise ValueError(f"the server names {len(keys)} clients, {max(2, threshold)} different ones are needed")


def _sealing_key(own: Secrets, keys: Mapping[int, Keys], other: int) -> bytes:
    return agree(own.sealing, keys[other][0], "seal")


def _label(label: str, sender: int, receiver: int) -> str:
    return f"{label}|{sender}|{receiver}"


def _add_pair_mask(total: Words, private: bytes, public: bytes, client: int, other: int) -> Words:
    """Add the mask that `client` and `other` share, with the sign that `client` gives it."""
    shared = mask(agree(private, public, "mask"), len(total))
    return total + shared if client < other else total - shared


# --- the server's half ----------------------------------------------------------------------------------------------


def unmasked_sum(
    vectors: Mapping[int, Words],
    keys: Mapping[int, Keys],
    commitments: Mapping[int, bytes],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
) -> Words:
    """Σ x_u over the clients whose vectors arrived.

    `revealed[u][v]` is the share of client u that v holds: of the seed, if u's vector arrived, else of its mask key.
    `keys` are those of all who sent shares, as only these are in anybody's masks. A ValueError says what does not fit.
    """
    (length,) = {len(vector) for vector in vectors.values()}
    total: Words = np.zeros(length, np.uint64)
    for vector in vectors.values():
        total = total + vector
    for client in keys:
        shares = dict(list(revealed.get(client, {}).items())[:threshold])
        if len(shares) < threshold:
            raise ValueError(f"{len(shares)} shares of client {client} came, {threshold} are needed")
        secret = combine(shares)
        if client in vectors:
            if hashlib.sha256(secret).digest() != commitments[client]:
                raise ValueError(f"the shares of client {client}'s seed do not give what it has committed to")
            total = total - mask(secret, length)
        else:
            if public_key(secret) != keys[client][1]:
                raise ValueError(f"the shares of client {client}'s key do not give its key")
            for other in vectors:  # what the others have added for it, and it has not taken away
                total = _add_pair_mask(total, secret, keys[other][1], client, other)
    return total
