"""A newcomer follows README and docs, from a wheel in a new environment; also with TLS. See walkthrough.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme
from walkthrough import BLOCK, LASTING, PAGES, ROOT, SPARK_PAGE, Walk, commands, make_environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("newcomer"))


@pytest.fixture
def first_port(worker_id: str) -> int:
    worker = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    return 22_000 + worker * 16


@pytest.fixture
def walk(environment: Path, tmp_path: Path, first_port: int) -> Walk:
    return Walk(environment, tmp_path, first_port, variables={})


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=_name)
def test_page_works_as_it_stands(page: Path, walk: Walk) -> None:
    with walk.cluster():
        for command in commands(page):
            walk.run(command)


@pytest.mark.timeout(900)
def test_client_commands_work_with_tls_from_the_environment_alone(
    environment: Path, tmp_path: Path, first_port: int
) -> None:
    authority, ca_file, node_file = trustme.CA(), tmp_path / "ca.pem", tmp_path / "node.pem"
    authority.cert_pem.write_to_path(ca_file)
    certificate = authority.issue_cert("127.0.0.1", "node-1", "node-2", "node-3")
    certificate.private_key_and_cert_chain_pem.write_to_path(node_file)
    variables = {"QUIVER_URL": f"https://127.0.0.1:{first_port}", "QUIVER_CA_FILE": str(ca_file)}
    walk = Walk(environment, tmp_path, first_port, variables=variables)
    settings = ("--tls-is-enabled", "true", "--tls-certificate-file", str(node_file), "--tls-ca-file", str(ca_file))
    with walk.cluster(*settings):
        for command in commands(ROOT / "docs/operations/cluster.md"):
            if command.startswith("quiver ") and not LASTING.search(command):
                walk.run(command)
        (tmp_path / "script.py").write_text(
            "import quiver\n"
            "with quiver.connect() as cluster, cluster.producer('logs') as producer:\n"
            "    print(producer.send('from the SDK').result())\n"
        )
        walk.run("python script.py")
        walk.run("quiver consume logs | grep -q 'from the SDK'")


@pytest.mark.parametrize("page", [*PAGES, SPARK_PAGE], ids=_name)
def test_every_block_is_run_or_says_where(page: Path) -> None:
    text = page.read_text()
    marks = [match[2].strip() for match in BLOCK.finditer(text)]
    assert len(marks) == len(re.findall(r"^ *```console", text, re.MULTILINE)), "a block is not recognized"
    marks = [mark for mark in marks if not re.fullmatch(r"host-\d( host-\d)*", mark)]  # run by cluster_walk.py
    assert set(marks) <= {"", "runnable", "spark", "elsewhere"}
