from __future__ import annotations

import datetime
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from equipoise.core.errors import ConfigError
from equipoise.deploy.transport import certs


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    out = tmp_path / "certs"
    certs.make(out, ["site_a", "site_b"], ["fl.example.org", "10.0.0.5"], days=30)
    return out


def test_server_and_sites_get_their_own_files(made: Path) -> None:
    assert names(made) == {
        *("authority/ca.key", "authority/ca.crt"),
        *("server/ca.crt", "server/server.crt", "server/server.key"),
        *("server/sites/site_a.pub", "server/sites/site_b.pub"),
        *("site_a/ca.crt", "site_a/key", "site_a/key.pub"),
        *("site_b/ca.crt", "site_b/key", "site_b/key.pub"),
    }
    for private in ("authority/ca.key", "server/server.key", "site_a/key", "site_b/key"):
        assert mode(made / private) == 0o600
        assert mode((made / private).parent) == 0o700
    key = load_ssh_private_key((made / "site_a/key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    public = load_ssh_public_key((made / "server/sites/site_a.pub").read_bytes())
    assert public == key.public_key()
    assert public != load_ssh_public_key((made / "server/sites/site_b.pub").read_bytes())


def test_the_certificate_names_its_hosts_and_expires(made: Path) -> None:
    certificate = x509.load_pem_x509_certificate((made / "server/server.crt").read_bytes())
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(host.value) for host in hosts} == {"fl.example.org", "10.0.0.5", "localhost", "127.0.0.1"}
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left < datetime.timedelta(days=30)


def shake(folder: Path, authority: Path, host: str) -> None:
    """A TLS handshake between a server with the certificate in `folder` and a client that trusts `authority`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            context.wrap_socket(far, server_side=True).close()
        except ssl.SSLError:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with near:
            trusting = ssl.create_default_context(cafile=str(authority))
            trusting.verify_flags |= ssl.VERIFY_X509_STRICT
            trusting.wrap_socket(near, server_hostname=host).close()
    finally:
        thread.join()


def test_sites_trust_the_server_under_its_names_only(made: Path, tmp_path: Path) -> None:
    shake(made / "server", made / "site_a/ca.crt", "fl.example.org")
    shake(made / "server", made / "site_b/ca.crt", "10.0.0.5")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake(made / "server", made / "site_a/ca.crt", "elsewhere.org")
    certs.make(tmp_path / "other", ["site_a"], ["fl.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(made / "server", tmp_path / "other/site_a/ca.crt", "fl.example.org")


def test_a_loopback_certificate_is_for_this_machine(tmp_path: Path) -> None:
    certs.loopback(tmp_path)
    shake(tmp_path, tmp_path / "ca.crt", "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(tmp_path, tmp_path / "ca.crt", "fl.example.org")


def test_a_site_can_be_added_later_and_nothing_else_changes(made: Path) -> None:
    before = {name: (made / name).read_bytes() for name in names(made)}
    certs.make(made, ["site_c"], [])
    assert names(made) - set(before) == {"site_c/ca.crt", "site_c/key", "site_c/key.pub", "server/sites/site_c.pub"}
    assert {name: (made / name).read_bytes() for name in before} == before
    assert (made / "site_c/ca.crt").read_bytes() == before["authority/ca.crt"]


def test_a_new_server_certificate_is_signed_by_the_same_authority(made: Path) -> None:
    for name in ("server.crt", "server.key"):
        (made / "server" / name).unlink()
    certs.make(made, [], ["new.example.org"])
    shake(made / "server", made / "site_a/ca.crt", "new.example.org")


@pytest.mark.parametrize(
    ("sites", "hosts", "sentence"),
    [
        (["site_a"], [], "site_a exists already"),
        (["site_c"], ["fl.example.org"], "leave out --host to add sites"),
        ([], [], "--sites is missing"),
        (["site_c", "site_c"], [], "expected every name once"),
        (["../up"], [], "expected a name of at most 63 letters"),
        (["server"], [], "neither authority nor server"),
    ],
)
def test_nothing_is_overwritten_and_a_refused_call_writes_nothing(
    made: Path, sites: list[str], hosts: list[str], sentence: str
) -> None:
    before = {name: (made / name).read_bytes() for name in names(made)}
    with pytest.raises(ConfigError, match=sentence):
        certs.make(made, sites, hosts)
    assert {name: (made / name).read_bytes() for name in names(made)} == before


@pytest.mark.parametrize(
    ("hosts", "sentence"), [([], "--host is missing"), (["fl example"], "expected a name such as")]
)
def test_a_mistake_in_the_first_call_writes_nothing(tmp_path: Path, hosts: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        certs.make(tmp_path / "certs", ["site_a"], hosts)
    assert not (tmp_path / "certs").exists()


def test_an_unreadable_authority_is_named(made: Path) -> None:
    (made / "authority/ca.key").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"the authority in .* cannot be read"):
        certs.make(made, ["site_c"], [])
