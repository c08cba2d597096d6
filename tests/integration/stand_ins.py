"""Stand-ins for programs that documentation uses and a machine may lack: just what the pages ask of them.

    python stand_ins.py curl -X POST 127.0.0.1:8002/topics -d '{"topic": "logs"}'
    python stand_ins.py openssl req -x509 -newkey ed25519 -nodes -subj "/CN=authority" -keyout ca.key -out ca.pem

An option that is not known here is an error: a page that begins to use one needs the program, or another line here.
"""

from __future__ import annotations

import argparse
import ipaddress
import shutil
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


def provide_missing(directory: Path) -> None:
    """Write a program into `directory` for each stand-in whose program is not on the PATH."""
    for name in PROGRAMS:
        if shutil.which(name) is None:
            write_program(directory, name)


def write_program(directory: Path, name: str) -> Path:
    """Write a stand-in as a program of that name; return its path."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
    program.chmod(0o755)
    return program


# -- curl ---------------------------------------------------------------------------------------------


def run_curl(arguments: list[str]) -> int:
    """Send a request and print the body of its answer, whatever its status."""
    parser = argparse.ArgumentParser(prog="curl", allow_abbrev=False)
    parser.add_argument("-X", dest="method")
    parser.add_argument("-d", dest="data")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("url")
    given = parser.parse_args(arguments)
    url = given.url if "://" in given.url else f"http://{given.url}"
    data = None if given.data is None else given.data.encode()
    request = urllib.request.Request(url, data, method=given.method)
    try:
        with urllib.request.urlopen(request) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        body = error.read()
    except urllib.error.URLError as error:
        sys.stderr.write(f"curl: {error.reason}\n")
        return 7
    sys.stdout.write(body.decode())
    return 0


# -- openssl ------------------------------------------------------------------------------------------


def run_openssl(arguments: list[str]) -> int:
    """Make a certificate of an authority, a request for a certificate, or the certificate that it asks for."""
    parser = argparse.ArgumentParser(prog="openssl", allow_abbrev=False)
    parser.add_argument("command", choices=("req", "x509"))
    for flag in ("-x509", "-nodes", "-req"):
        parser.add_argument(flag, dest=f"is_{flag[1:]}", action="store_true")
    parser.add_argument("-newkey", choices=("ed25519",))
    parser.add_argument("-copy_extensions", choices=("copy",))
    parser.add_argument("-days", type=int, default=30)
    for flag in ("-subj", "-addext", "-keyout", "-out", "-in", "-CA", "-CAkey"):
        parser.add_argument(flag, dest=flag[1:], default="")
    given = parser.parse_args(arguments)
    if given.command == "x509":
        made = _sign(given)
    else:
        key = Ed25519PrivateKey.generate()
        Path(given.keyout).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        made = _certify_itself(given, key) if given.is_x509 else _ask(given, key)
    Path(given.out).write_bytes(made)
    return 0


def _certify_itself(given: argparse.Namespace, key: Ed25519PrivateKey) -> bytes:
    name = _name(given.subj)
    builder = _certificate(name, name, key.public_key(), key, given.days).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    if given.addext:
        builder = builder.add_extension(_key_usage(given.addext), critical=True)
    return builder.sign(key, None).public_bytes(Encoding.PEM)


def _ask(given: argparse.Namespace, key: Ed25519PrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(given.subj))
    if given.addext:
        builder = builder.add_extension(_alternative_names(given.addext), critical=False)
    return builder.sign(key, None).public_bytes(Encoding.PEM)


def _sign(given: argparse.Namespace) -> bytes:
    request = x509.load_pem_x509_csr(Path(vars(given)["in"]).read_bytes())
    authority = x509.load_pem_x509_certificate(Path(given.CA).read_bytes())
    key = load_pem_private_key(Path(given.CAkey).read_bytes(), None)
    public = request.public_key()
    assert isinstance(key, Ed25519PrivateKey)
    assert isinstance(public, Ed25519PublicKey)
    builder = _certificate(request.subject, authority.subject, public, key, given.days)
    for extension in request.extensions if given.copy_extensions else ():
        builder = builder.add_extension(extension.value, critical=extension.critical)
    return builder.sign(key, None).public_bytes(Encoding.PEM)


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: Ed25519PublicKey, key: Ed25519PrivateKey, days: int
) -> x509.CertificateBuilder:
    """Return a certificate to sign, with the identifiers of keys that OpenSSL adds and Python 3.13 asks for."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )


def _name(subject: str) -> x509.Name:
    _, _, common_name = subject.partition("/CN=")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _key_usage(text: str) -> x509.KeyUsage:
    name, _, usages = text.partition("=")
    assert (name, usages) == ("keyUsage", "critical,keyCertSign,cRLSign"), text
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(text: str) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for part in text.removeprefix("subjectAltName=").split(","):
        kind, _, value = part.partition(":")
        names.append(x509.DNSName(value) if kind == "DNS" else x509.IPAddress(ipaddress.ip_address(value)))
    return x509.SubjectAlternativeName(names)


PROGRAMS = {"curl": run_curl, "openssl": run_openssl}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
