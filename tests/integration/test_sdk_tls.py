"""The SDK with TLS: reaches nodes that it can believe, by wire and by HTTP, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import quiver
from quiver.errors import ConfigError, UnavailableError
from quiver.testing import LocalCluster


@pytest.fixture(scope="module")
def ca_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("tls") / "ca.pem")


@pytest.fixture(scope="module")
def local(ca_file: str) -> Iterator[LocalCluster]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca_file)
    certificate_file = str(Path(ca_file).with_name("node.pem"))
    issued = authority.issue_cert("127.0.0.1", "localhost", "node-1")
    issued.private_key_and_cert_chain_pem.write_to_path(certificate_file)
    settings = {"tls.is_enabled": "true", "tls.certificate_file": certificate_file, "tls.ca_file": ca_file}
    with LocalCluster(nodes=1, settings=settings) as local:
        yield local


@pytest.mark.parametrize("kind", ["wire", "http"])
def test_cluster_with_tls_is_used_by_who_believes_its_authority(local: LocalCluster, ca_file: str, kind: str) -> None:
    address = local.addresses[0] if kind == "wire" else local.urls[0]
    with quiver.connect(address, ca_file=ca_file) as cluster:
        cluster.create_topic(f"logs-{kind}", partitions=1)
        assert cluster.producer(f"logs-{kind}").send("hello").result().offset == 0


def test_members_of_groups_use_tls_too(local: LocalCluster, ca_file: str) -> None:
    with quiver.connect(local.addresses[0], ca_file=ca_file) as cluster:
        cluster.create_topic("shared", partitions=1)
        cluster.producer("shared").send("hello").result()
        with cluster.consumer("shared", group="billing") as member:
            assert [record.text for record in member.poll(timeout=30)] == ["hello"]


@pytest.mark.parametrize("is_with_tls", [True, False])
def test_cluster_with_tls_is_out_of_reach_for_others(local: LocalCluster, is_with_tls: bool) -> None:
    with pytest.raises(UnavailableError):
        quiver.connect(local.addresses[0], timeout=1, tls=is_with_tls)


def test_file_that_is_not_there_is_an_error_of_the_settings(local: LocalCluster) -> None:
    with pytest.raises(ConfigError):
        quiver.connect(local.addresses[0], ca_file="/nowhere/ca.pem")
