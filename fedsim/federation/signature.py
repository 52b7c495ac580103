# SPDX-License-Identifier: Apache-2.0
"""The server's signature on what it sends, by which a client knows it from what another client sends.

Flower 1.41 takes a message from every authenticated node, whoever it says that it is from, and hands it to the node
that it names. So TLS and the keys of nodes do not show that an instruction is the server's. Here the server signs
(Ed25519) every message for one run, one node and one kind of message, with a number that it uses once, and all of its
content. A client checks that before it does anything else, and writes the number into its ledger, so that no message is
answered twice.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedsim.errors import DeployError, PolicyError
from fedsim.federation.asked import Rows

ENVELOPE = "server"
"""The record that is added to the content of every message."""
_PURPOSE = b"fedsim: a message of the server, version 1"
_REFUSED = "this message is not from this client's server"


class Signer:
    """Signs the messages of one run."""

    def __init__(self, key: Ed25519PrivateKey, run: int) -> None:
        self.key, self.run = key, run
        self._digests: dict[int, tuple[object, bytes]] = {}

    def signed(self, content: RecordDict, node: int, kind: str, rows: Rows | None) -> RecordDict:
        """The content for a node, with the rows that the server's claim counts on, and the signature."""
        least, most = (rows.least, rows.most or 0) if rows else (0, 0)
        envelope: dict[str, Any] = {"number": secrets.token_hex(16), "least-rows": least, "most-rows": most}
        whole = RecordDict({**content, ENVELOPE: ConfigRecord(dict(envelope))})
        text = _text(whole, self.run, node, kind, self._digest)
        return RecordDict({**content, ENVELOPE: ConfigRecord({**envelope, "signature": self.key.sign(text)})})

    def forget(self) -> None:
        """Remember the digests of records no longer: a model is sent to all clients, and is hashed once for them."""
        self._digests.clear()

    def _digest(self, record: ArrayRecord | ConfigRecord | MetricRecord) -> bytes:
        if not isinstance(record, ArrayRecord):
            return record_digest(record)
        if id(record) not in self._digests:
            self._digests[id(record)] = record, record_digest(record)  # which keeps the record, and so its id
        return self._digests[id(record)][1]


def check_signature(message: Message, run: int, node: int, key: Ed25519PublicKey) -> str:
    """The number of a message that the server has signed for this node and run; PolicyError for every other message."""
    envelope = message.content.config_records.get(ENVELOPE)
    if envelope is None:
        raise PolicyError(f"{_REFUSED}: it is not signed")
    fields = {name: value for name, value in envelope.items() if name != "signature"}
    number, signature = fields.get("number"), envelope.get("signature")
    whole = RecordDict({**message.content, ENVELOPE: ConfigRecord(fields)})
    try:
        if not isinstance(signature, bytes) or not isinstance(number, str):
            raise InvalidSignature
        key.verify(signature, _text(whole, run, node, message.metadata.message_type, record_digest))
    except InvalidSignature:
        raise PolicyError(
            f"{_REFUSED}: its signature is not by the key in server.pub, or is for another client, run or content"
        ) from None
    return number


def counted_rows(content: RecordDict) -> Rows | None:
    """Between which numbers of rows the server's claim takes the client to hold; None, if it counts on nothing."""
    envelope = content.config_records.get(ENVELOPE) or ConfigRecord()
    return Rows.read(envelope.get("least-rows"), envelope.get("most-rows"))


def read_private(pem: bytes) -> Ed25519PrivateKey:
    """The server's key in a file; a DeployError for what is none."""
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise DeployError("signing.key is not an Ed25519 key; restore it from a backup")
    return key


def read_public(pem: bytes) -> Ed25519PublicKey:
    """The public key of the server in a client's file; a DeployError for what is none."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise DeployError("server.pub is not the public key of a server; copy it from the server's folder")
    return key


Digest = Callable[[ArrayRecord | ConfigRecord | MetricRecord], bytes]


def _text(content: RecordDict, run: int, node: int, kind: str, digest: Digest) -> bytes:
    """What is signed: what the message is for, and the digest of each of its records, by name."""
    parts = [_PURPOSE, str(run).encode(), str(node).encode(), kind.encode()]
    for name, record in sorted(content.items()):
        parts += [name.encode(), type(record).__name__.encode(), digest(record)]
    return _hashed(parts)


def record_digest(record: ArrayRecord | ConfigRecord | MetricRecord) -> bytes:
    """SHA-256 of all that a record holds, in the order of its keys."""
    parts: list[bytes] = []
    if isinstance(record, ArrayRecord):
        for name, array in sorted(record.items()):
            parts += [name.encode(), repr((array.dtype, tuple(array.shape), array.stype)).encode(), array.data]
    else:
        for key in sorted(record):  # numbers, texts, bytes, truth values and lists of them, which all print apart
            parts += [key.encode(), repr(record[key]).encode()]
    return _hashed(parts)


def _hashed(parts: list[bytes]) -> bytes:
    """SHA-256 of parts whose borders cannot be moved."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
