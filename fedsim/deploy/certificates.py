# SPDX-License-Identifier: Apache-2.0
"""The certificate authority, the server's certificate, and the key pairs of clients.

The server signs what it sends by an Ed25519 key; all others are ECDSA on P-384. Clients trust exactly this authority
(they are given its certificate, not the system's list), and the server knows clients by their public keys, which are in
OpenSSH's format because Flower reads that.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim.errors import DeployError

CA_DAYS, SERVER_DAYS = 3650, 825
LOCAL = ("localhost", "127.0.0.1", "::1")
"""What the server's own processes connect to."""


@dataclass(frozen=True)
class Pair:
    """A private key and what belongs to it (a certificate, or a public key), as files hold them."""

    private: bytes
    public: bytes


def make_authority(name: str = "fedsim") -> Pair:
    """A certificate authority that can sign servers and nothing below itself."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
    certificate = (
        _builder(subject, subject, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return Pair(_private_pem(key), certificate.public_bytes(serialization.Encoding.PEM))


def make_server(authority: Pair, hosts: Sequence[str]) -> Pair:
    """A server's key and certificate for these names and addresses, and for its own machine."""
    signer = serialization.load_pem_private_key(authority.private, None)
    issuer = x509.load_pem_x509_certificate(authority.public)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise DeployError("the authority's key is not an elliptic-curve key; make the folder anew")
    key = ec.generate_private_key(ec.SECP384R1())
    names = list(dict.fromkeys([*hosts, *LOCAL]))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(signer, hashes.SHA384())
    )
    return Pair(_private_pem(key), certificate.public_bytes(serialization.Encoding.PEM))


def make_client(name: str) -> Pair:
    """A client's key pair, in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    return Pair(private, public + f" {name}\n".encode())


def make_signer() -> Pair:
    """The key by which the server signs its messages to clients (Ed25519), and the public one that they know it by."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Pair(private, public)


def names_of(certificate: bytes) -> list[str]:
    """The names and addresses that a certificate is for."""
    found = _load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return [*found.get_values_for_type(x509.DNSName), *addresses]


def days_left(certificate: bytes) -> float:
    """Until a certificate expires; negative if it has."""
    left = _load(certificate).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left.total_seconds() / 86400


def signed_by(certificate: bytes, authority: bytes) -> bool:
    """Whether the authority signed the certificate."""
    try:
        _load(certificate).verify_directly_issued_by(_load(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _load(certificate: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise DeployError(f"a certificate cannot be read ({error}); restore it, or make the folder anew") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of new machines are off
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
