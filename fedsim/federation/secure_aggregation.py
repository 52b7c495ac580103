# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation for real: the server gets the sum of the clients' vectors, and masked vectors that tell nothing.

The protocol of Bonawitz et al. 2017 (Figure 4, without the parts against a server that forges messages), in four waves:

1. keys     every client sends two fresh public keys, and a commitment to its own mask seed b
2. shares   every client splits its mask key s and its seed b into shares, one for each other client, sealed for it;
            the server passes them on and cannot read them. A fingerprint (SHA-256) of every share goes with them
3. vectors  y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)  mod 2⁶⁴
4. unmask   of who sent a vector the others give their shares of b, of who did not those of s; never both of one client

A client that sends garbage is left out, and the others do not fail by it. What is public (keys, sizes) the server
checks, and drops its sender before anything is released. What is sealed it cannot check: a client that cannot open a
share masks its vector all the same, so that the masks of the others cancel, and gives an empty share when it is asked.
A share that is given is held against its fingerprint, so that nobody can give a wrong one. Shares that fit their
fingerprints and do not give the secret prove that their client has dealt them wrongly. Where too few good ones are
given, it has too, as long as no more than n − threshold clients are at fault (silent ones count), as else enough would
have had good ones; where more must be, nobody is blamed. The sum stays masked, and the round begins again with fresh
secrets and without the culprit, which is shut out for the rest of the run. So a client can cost the others one masked
vector in a run, which their ledgers are charged for, and nothing more. Nobody is ever asked for both shares of one
client: the shares of a later attempt are of other secrets.

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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedsim.federation.masking import (
    SEALED_BYTES,
    SHARE_BYTES,
    Words,
    agree,
    combine,
    fingerprint,
    mask,
    new_key,
    public_key,
    seal,
    split,
    unseal,
    usable,
)

Keys = tuple[bytes, bytes]
"""The public keys of a client: for sealing shares, and for masks."""


class Dealt(NamedTuple):
    """What one client deals to another: its shares of the mask key and of the seed, sealed, and their fingerprints."""

    sealed: bytes
    prints: bytes


class UnmaskingError(ValueError):
    """Why there is no sum, and the clients whose doing it is, each with the reason; nobody's, if too few are left."""

    def __init__(self, reason: str, culprits: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.culprits = dict(culprits or {})


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


def sealed_shares(own: Secrets, keys: Mapping[int, Keys], threshold: int, label: str) -> dict[int, Dealt]:
    """For every client, itself too: its shares of this client's mask key and seed, sealed for it."""
    _check_keys(own, keys, threshold)
    of_key = split(own.masking, list(keys), threshold)
    of_seed = split(own.seed, list(keys), threshold)
    dealt = {}
    for other in keys:
        content, what = of_key[other] + of_seed[other], _label(label, own.client, other)
        dealt[other] = Dealt(seal(_sealing_key(own, keys, other), content, what), _prints(content, what))
    return dealt


def masked(own: Secrets, keys: Mapping[int, Keys], words: Words) -> Words:
    """y_u: the vector, with its own mask and one for each other client, which cancels in the sum."""
    total: Words = words + mask(own.seed, len(words))
    for other, (_, public) in keys.items():
        if other != own.client:
            total = _add_pair_mask(total, own.masking, public, own.client, other)
    return total


def unmasking(
    own: Secrets, keys: Mapping[int, Keys], shares: Mapping[int, Dealt], arrived: set[int], threshold: int, label: str
) -> dict[int, bytes]:
    """The shares that the server needs: of the seed of who arrived, of the mask key of who did not. Never both.

    Of a client whose shares cannot be opened, or are not those of its fingerprints, there is an empty one.
    """
    if own.client not in arrived or not arrived <= set(shares) or len(arrived) < threshold:
        raise ValueError(
            f"the server asks to unmask the sum of {len(arrived)} clients, at least {threshold} of its own round are"
            " needed"
        )
    revealed = {}
    for other, (sealed, prints) in shares.items():
        what = _label(label, other, own.client)
        try:
            content = unseal(_sealing_key(own, keys, other), sealed, what)
        except ValueError:
            content = b""
        fits = len(content) == 2 * SHARE_BYTES and _prints(content, what) == prints
        half = slice(SHARE_BYTES, None) if other in arrived else slice(SHARE_BYTES)
        revealed[other] = content[half] if fits else b""
    return revealed


def _check_keys(own: Secrets, keys: Mapping[int, Keys], threshold: int) -> None:
    if keys.get(own.client) != own.keys:
        raise ValueError("the server does not pass this client's own keys on")
    different = {public for pair in keys.values() for public in pair}
    if len(keys) < max(2, threshold) or len(different) != 2 * len(keys):
        raise ValueError(f"the server names {len(keys)} clients, {max(2, threshold)} different ones are needed")


def _prints(content: bytes, label: str) -> bytes:
    """The fingerprints of a share of the mask key and of a share of the seed."""
    return fingerprint(content[:SHARE_BYTES], f"{label}|key") + fingerprint(content[SHARE_BYTES:], f"{label}|seed")


def _sealing_key(own: Secrets, keys: Mapping[int, Keys], other: int) -> bytes:
    return agree(own.sealing, keys[other][0], "seal")


def _label(label: str, sender: int, receiver: int) -> str:
    return f"{label}|{sender}|{receiver}"


def _add_pair_mask(total: Words, private: bytes, public: bytes, client: int, other: int) -> Words:
    """Add the mask that `client` and `other` share, with the sign that `client` gives it."""
    shared = mask(agree(private, public, "mask"), len(total))
    return total + shared if client < other else total - shared


# --- the server's half ----------------------------------------------------------------------------------------------


def unusable_keys(published: Mapping[int, tuple[Keys, bytes]]) -> dict[int, str]:
    """What is wrong with the keys and commitments that clients have sent, for each whose are wrong.

    Nobody knows another's fresh keys when it sends its own, so equal ones are the doing of both.
    """
    times = Counter(public for keys, _ in published.values() for public in keys)
    reasons = {}
    for client, (keys, commitment) in published.items():
        if not all(map(usable, keys)) or len(commitment) != hashlib.sha256().digest_size:
            reasons[client] = "its public keys cannot be used"
        elif any(times[public] > 1 for public in keys):
            reasons[client] = "its public keys are not its own: another has the same"
    return reasons


def is_dealt(dealt: Dealt) -> bool:
    """Whether something has the form of what a client deals; what is in it only its holder can see."""
    return len(dealt.sealed) == SEALED_BYTES and len(dealt.prints) == 2 * hashlib.sha256().digest_size


def is_given(share: bytes, dealt: Dealt, label: str, dealer: int, holder: int, *, seed: bool) -> bool:
    """Whether a holder gives the share that it was dealt, or none, which it may."""
    prints = dealt.prints[32:] if seed else dealt.prints[:32]
    return not share or fingerprint(share, f"{_label(label, dealer, holder)}|{'seed' if seed else 'key'}") == prints


def unmasked_sum(
    vectors: Mapping[int, Words],
    keys: Mapping[int, Keys],
    commitments: Mapping[int, bytes],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
) -> Words:
    """Σ x_u over the clients whose vectors arrived.

    `revealed[u][v]` is the share of client u that v holds: of the seed, if u's vector arrived, else of its mask key;
    empty, if v has no good one. Each is that of its fingerprint (`is_given`). `keys` are those of all who sent shares,
    as only these are in anybody's masks. An UnmaskingError names those whose shares do not give their secrets.
    """
    secrets_ = _all_secrets(set(vectors), keys, commitments, revealed, threshold)
    (length,) = {len(vector) for vector in vectors.values()}
    total: Words = np.zeros(length, np.uint64)
    for vector in vectors.values():
        total = total + vector
    for client, secret in secrets_.items():
        if client in vectors:
            total = total - mask(secret, length)
        else:
            for other in vectors:  # what the others have added for it, and it has not taken away
                total = _add_pair_mask(total, secret, keys[other][1], client, other)
    return total


def _all_secrets(
    arrived: set[int],
    keys: Mapping[int, Keys],
    commitments: Mapping[int, bytes],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
) -> dict[int, bytes]:
    """Of each client its seed, if its vector has arrived, else its mask key; or an UnmaskingError."""
    found: dict[int, bytes] = {}
    proven, suspected = {}, {}
    for client, (_, public) in keys.items():
        shares = revealed.get(client, {})
        given = {holder: share for holder, share in shares.items() if share}
        if len(given) < threshold:
            suspected[client] = (
                f"{len(given)} of {len(shares)} clients hold good shares of its secrets, not {threshold}"
            )
            continue
        try:
            found[client] = _secret(given, public, commitments[client] if client in arrived else None, threshold)
        except ValueError as error:
            proven[client] = str(error)
    if not proven and not suspected:
        return found
    holders = {holder for shares in revealed.values() for holder in shares}
    plausible = len(holders - suspected.keys()) >= threshold  # else more than n − threshold would be at fault
    first, reason = min((proven | suspected).items())
    raise UnmaskingError(f"the secrets of client {first} are lost, {reason}", proven | (suspected if plausible else {}))


def _secret(shares: Mapping[int, bytes], public: bytes, commitment: bytes | None, threshold: int) -> bytes:
    """The seed of a client that has committed to it, or without a commitment its mask key."""
    secret = combine(dict(list(shares.items())[:threshold]))
    fits = public_key(secret) == public if commitment is None else hashlib.sha256(secret).digest() == commitment
    if not fits:
        what = "the mask key of its public one" if commitment is None else "the seed that it has committed to"
        raise ValueError(f"its shares do not give {what}")
    return secret
