# SPDX-License-Identifier: Apache-2.0
"""What secure aggregation is made of: fixed-point numbers, masks, key agreement, and shares of a secret.

All arithmetic on vectors is modulo 2⁶⁴, in which masks cancel exactly. Curve25519 and ChaCha20 are those of the
`cryptography` package; Shamir's scheme (1979) is over the field of 2⁵²¹ − 1.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

Words = NDArray[np.uint64]

FRACTION = 24
"""Bits behind the binary point: a number is rounded to a multiple of 2⁻²⁴."""
LARGEST = 2.0**38
"""The largest magnitude of a number, and of a sum of them."""
PRIME = 2**521 - 1
MOST_HOLDERS = 1_000_000
"""Holders are numbered below this; no federation has as many clients."""
SECRET_BYTES = 32
SHARE_BYTES = 66
SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16
"""Of two shares, sealed: nonce, shares, tag."""


# --- fixed-point numbers --------------------------------------------------------------------------------------------


def to_words(values: NDArray[np.float64], clients: int) -> Words:
    """Numbers as integers modulo 2⁶⁴; a ValueError for what is no number, or so large that a sum could overflow."""
    if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > LARGEST / clients:
        raise ValueError(f"a number is beyond ±{LARGEST / clients:g}, the range of secure aggregation")
    return np.rint(values * 2.0**FRACTION).astype(np.int64).view(np.uint64)


def from_words(words: Words) -> NDArray[np.float64]:
    """The numbers that a sum of words stands for."""
    return words.view(np.int64).astype(np.float64) * 2.0**-FRACTION


_ANY_KEY = b"k" * SECRET_BYTES

# --- masks ----------------------------------------------------------------------------------------------------------


def mask(seed: bytes, length: int) -> Words:
    """A vector that is uniform to whoever does not know the seed (32 bytes): the key stream of ChaCha20.

    A seed masks one vector only, so that the nonce may be constant.
    """
    cipher = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8").astype(np.uint64, copy=False)


def new_key() -> bytes:
    """A private key of X25519 from the operating system's randomness."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: str) -> bytes:
    """The 32 bytes that two clients share, each by its own private and the other's public key, for one purpose."""
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return hashlib.blake2b(shared, digest_size=32, person=b"fedsim-secagg", key=purpose.encode()[:64]).digest()


def usable(public: object) -> bool:
    """Whether a public key can be agreed with, by everybody alike: not of another length, not a point of small order.

    A private key of X25519 is a multiple of the cofactor, so a point of small order gives zero with every one of them.
    """
    try:
        agree(_ANY_KEY, public, "")  # type: ignore[arg-type] # whatever somebody sends
    except (ValueError, TypeError):
        return False
    return True


def seal(key: bytes, content: bytes, label: str) -> bytes:
    """Encrypt and authenticate, together with what it is for."""
    nonce = secrets.token_bytes(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, label.encode())


def unseal(key: bytes, sealed: bytes, label: str) -> bytes:
    """What was sealed; a ValueError for what was not sealed by this key for this purpose."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], label.encode())
    except (InvalidTag, ValueError):  # a ValueError for what is shorter than its nonce
        raise ValueError("a share was changed on its way") from None


def fingerprint(share: bytes, label: str) -> bytes:
    """The SHA-256 by which a share is known again; it tells nothing of a share that cannot be guessed."""
    return hashlib.sha256(label.encode() + b"|" + share).digest()


# --- shares of a secret ---------------------------------------------------------------------------------------------


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share of the secret for every holder (numbers from 0): `threshold` of them give it, fewer tell nothing.

    The share of holder x is f(x + 1) for a random polynomial f of degree threshold − 1 with f(0) the secret.
    """
    if not 1 <= threshold <= len(set(holders)):
        raise ValueError(f"a threshold of {threshold} among {len(set(holders))} holders")
    if not all(0 <= holder < MOST_HOLDERS for holder in holders):
        raise ValueError("a holder has a number that is none of a client; that of number -1 is the secret itself")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {holder: _evaluate(coefficients, holder + 1).to_bytes(SHARE_BYTES, "big") for holder in holders}


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from the shares of `threshold` holders or more: Lagrange's interpolation at 0."""
    points = {holder + 1: int.from_bytes(share, "big") for holder, share in shares.items()}
    total = 0
    for x, y in points.items():
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total = (total + y * above * pow(below, -1, PRIME)) % PRIME
    if total >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares of a secret do not fit together")
    return total.to_bytes(SECRET_BYTES, "big")


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
