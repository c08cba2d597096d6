"""Spark and a secure cluster: reads through TLS with a token, only what it may, and shows the token nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from secured_cluster import SecuredCluster, secured_cluster

from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.secrets import read_secret


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("security")) as cluster:
        with cluster.admin() as admin:
            for topic in ("logs.web", "pay.web"):
                admin.create_topic(topic, partitions=1)
                admin.producer(topic).send_many([f"{topic} {number}" for number in range(3)])
        yield cluster


@pytest.fixture(scope="module")
def reader(secured: SecuredCluster) -> str:
    return secured.add_user("reader", (Verb.READ, "logs."))


def _reading(spark: SparkSession, secured: SecuredCluster, topic: str, **options: str) -> DataFrame:
    known = {"servers": secured.url, "caFile": secured.ca_file, "subscribe": topic}
    return spark.read.format("quiver").options(**(known | options)).load()


def test_topic_is_read_through_tls_with_a_token(spark: SparkSession, secured: SecuredCluster, reader: str) -> None:
    frame = _reading(spark, secured, "logs.web", tokenFile=reader)
    assert [bytes(row["value"]) for row in frame.collect()] == [b"logs.web 0", b"logs.web 1", b"logs.web 2"]
    with pytest.raises(PySparkException, match=r"pay\.web"):
        _reading(spark, secured, "pay.web", tokenFile=reader).collect()
    with pytest.raises(PySparkException, match="credentials"):
        _reading(spark, secured, "logs.web").collect()


def test_topic_is_read_with_a_password_that_no_plan_shows(spark: SparkSession, secured: SecuredCluster) -> None:
    password = "a password of some length"
    with secured.admin() as admin:
        admin.access.create_user("ann", password=password)
        admin.access.add_grant(Grant(subject="user:ann", verb=Verb.READ, kind=ResourceKind.TOPIC, name="logs.web"))
    servers = secured.local.addresses[0]
    frame = _reading(spark, secured, "logs.web", servers=servers, user="ann", password=password)
    assert frame.count() == 3
    shown = [frame._jdf.queryExecution().toString(), repr(frame)]
    with pytest.raises(PySparkException, match="credentials") as refused:
        _reading(spark, secured, "logs.web", servers=servers, user="ann", password=f"no {password}").collect()
    assert not [text for text in (*shown, str(refused.value)) if password in text]


def _pages(spark: SparkSession) -> str:
    """Return what Spark's pages and its event log say about the queries so far."""
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    found = [executions.apply(at) for at in range(executions.length())]
    assert found
    return "".join(f"{one.description()} {one.details()} {one.physicalPlanDescription()}" for one in found)


def test_token_is_in_no_plan_page_error_or_checkpoint(
    spark: SparkSession, secured: SecuredCluster, reader: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = read_secret(reader).reveal()
    frame = _reading(spark, secured, "logs.web", token=token)
    assert frame.count() == 3
    shown = [frame._jdf.queryExecution().toString(), repr(frame), str(spark.sparkContext.getConf().getAll())]
    for mode in ("simple", "extended", "formatted"):
        frame.explain(mode)
        shown.append(capsys.readouterr().out)
        assert "quiver" in shown[-1]
    shown.append(_pages(spark))
    with pytest.raises(PySparkException) as refused:
        _reading(spark, secured, "pay.web", token=token).collect()
    shown.append(str(refused.value))
    with pytest.raises(PySparkException) as refused:
        spark.read.format("quiver").options(servers="http://10.0.0.1", subscribe="logs.web", token=token).load().count()
    shown.append(str(refused.value))
    assert "plain text" in shown[-1]
    known = {"servers": secured.url, "caFile": secured.ca_file, "subscribe": "logs.web", "token": token}
    stream = spark.readStream.format("quiver").options(**known, startingOffsets="earliest").load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(folder)).trigger(availableNow=True)
    running = query.start()
    running.awaitTermination()
    shown += [str(running.recentProgress), running._jsq.explainInternal(True)]
    shown += [path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()]
    assert sum(int(progress["numInputRows"]) for progress in running.recentProgress) == 3
    assert not [text[:200] for text in shown if token in text]
