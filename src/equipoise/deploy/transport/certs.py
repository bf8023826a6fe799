"""Certificates and keys: a certificate authority, the server's certificate, and one key pair for each site.

authority/   ca.key and ca.crt; the key signs certificates and should be kept offline
server/      ca.crt, server.crt, server.key, and sites/NAME.pub of every site that may join
NAME/        ca.crt, key and key.pub, for the site NAME alone
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from equipoise.core.errors import ConfigError

AUTHORITY_DAYS = 3650
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
RESERVED = ("authority", "server")


def make(out: Path, sites: Sequence[str], hosts: Sequence[str], days: int = 365) -> list[Path]:
    """Write the files above that are missing, and return the folders to give to the server and the new sites. No
    file is ever overwritten."""
    authority, server = out / "authority", out / "server"
    _check(out, sites, hosts)
    if (authority / "ca.key").exists():
        ca_key, ca = _load(authority)
    else:
        ca_key = ec.generate_private_key(ec.SECP384R1())
        ca = _certificate(ca_key, "Equipoise authority", ca_key, None, AUTHORITY_DAYS)
        _write(authority / "ca.key", _pem(ca_key), private=True)
        _write(authority / "ca.crt", ca.public_bytes(Encoding.PEM))
    if not (server / "server.key").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        certificate = _certificate(key, hosts[0], ca_key, ca, days, hosts)
        _write(server / "server.key", _pem(key), private=True)
        _write(server / "server.crt", certificate.public_bytes(Encoding.PEM))
        if not (server / "ca.crt").exists():
            _write(server / "ca.crt", ca.public_bytes(Encoding.PEM))
    for name in sites:
        private = ec.generate_private_key(ec.SECP384R1())
        public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()
        _write(out / name / "key", private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), True)
        _write(out / name / "key.pub", public)
        _write(out / name / "ca.crt", ca.public_bytes(Encoding.PEM))
        _write(server / "sites" / f"{name}.pub", public)
    return [server, *(out / name for name in sites)]


def loopback(folder: Path) -> None:
    """Write ca.crt, server.crt and server.key for connections within this machine to a temporary folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate(key, "Equipoise loopback", key, None, days=AUTHORITY_DAYS)
    own = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(own, "localhost", key, ca, AUTHORITY_DAYS, ["localhost", "127.0.0.1"])
    _write(folder / "ca.crt", ca.public_bytes(Encoding.PEM))
    _write(folder / "server.key", _pem(own), private=True)
    _write(folder / "server.crt", certificate.public_bytes(Encoding.PEM))


def check_name(name: str) -> str:
    """The same name, after a check that a site can have it."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise ConfigError(
            f"site {name!r}: expected a name of at most 63 letters, digits, '.', '_' and '-' that begins with a "
            f"letter or a digit, and neither {' nor '.join(RESERVED)}"
        )
    return name


def _check(out: Path, sites: Sequence[str], hosts: Sequence[str]) -> None:
    """Check all arguments before the first file is written."""
    for name in sites:
        check_name(name)
        if (out / name).exists():
            raise ConfigError(
                f"{out / name} exists already: a site's key is never overwritten, remove the folder first"
            )
    if len(set(sites)) < len(sites):
        raise ConfigError(f"--sites {','.join(sites)}: expected every name once")
    exists = (out / "server" / "server.key").exists()
    if not hosts and not exists:
        raise ConfigError("--host is missing: expected the names or addresses under which sites reach the server")
    if hosts and exists:
        raise ConfigError(
            f"{out / 'server' / 'server.key'} exists already: leave out --host to add sites, or remove server.key "
            "and server.crt to make a new certificate for the server"
        )
    for host in hosts:
        _alternative(host)
    if not sites and exists:
        raise ConfigError("--sites is missing: expected the names of the sites to add")


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    days: int,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """The server's certificate for `hosts`; without an issuer, the certificate of the authority."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    # The certificate is valid from an hour ago, so that a machine whose clock is slow accepts it too.
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(_usage(authority=issuer is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is not None:
        names = [_alternative(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise ConfigError(f"--host {host!r}: expected a name such as fl.example.org or an address such as 10.0.0.5")
    return x509.DNSName(host)


def _load(authority: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = load_pem_private_key((authority / "ca.key").read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the authority in {authority} cannot be read ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{authority / 'ca.key'} is not a key that Equipoise made")
    return key, certificate


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(file: Path, content: bytes, private: bool = False) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except FileExistsError:
        raise ConfigError(f"{file} exists already: keys and certificates are never overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
