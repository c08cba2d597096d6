"""The design that Quiver's HTTP interface replaces: Flask, SQLAlchemy's ORM and PostgreSQL, a row per message.

It has the two calls that are compared, in the form of the same contract. Produce inserts a row and commits; consume
locks the consumer's cursor, reads the next row, moves the cursor and commits. It does nothing else: no check of the
producer's registration, no partitions, no replicas, which favours it. `QUIVER_BENCH_DATABASE` is its database;
gunicorn runs it (`gunicorn flask_peer:app`), with tables made by `create_tables`.
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, request
from sqlalchemy import BigInteger, Text, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

THREADS = 32
"""Threads of each worker, and its connections to the database."""

app = Flask(__name__)
engine = create_engine(os.environ.get("QUIVER_BENCH_DATABASE", "postgresql+psycopg://"), pool_size=THREADS)


class Base(DeclarativeBase):
    """All tables."""


class Message(Base):
    """A message, in order of arrival."""

    __tablename__ = "messages"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    topic: Mapped[str] = mapped_column(Text)
    producer_id: Mapped[int] = mapped_column(BigInteger)
    message: Mapped[str] = mapped_column(Text)


class Cursor(Base):
    """A consumer's cursor: the last row that it consumed."""

    __tablename__ = "cursors"

    consumer_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    message_id: Mapped[int] = mapped_column(BigInteger)


@app.post("/producer/produce")
def produce() -> dict[str, Any]:
    asked = request.get_json()
    with Session(engine) as session:
        row = Message(topic=asked["topic"], producer_id=asked["producer_id"], message=asked["message"])
        session.add(row)
        session.commit()
        return {"status": "success", "partition_id": 0, "offset": row.id}


@app.get("/consumer/consume")
def consume() -> Any:
    topic, consumer_id = request.args["topic"], int(request.args["consumer_id"])
    with Session(engine) as session:
        cursor = session.get_one(Cursor, consumer_id, with_for_update=True)
        following = select(Message).where(Message.topic == topic, Message.id > cursor.message_id)
        row = session.scalars(following.order_by(Message.id).limit(1)).first()
        if row is None:
            return "", 204
        cursor.message_id = row.id
        answer = {"status": "success", "message": row.message, "partition_id": 0, "offset": row.id}
        session.commit()
        return answer


def create_tables(url: str, consumers: int) -> None:
    """Create the tables, and cursors at the start for consumers 1 to `consumers`."""
    database = create_engine(url)
    Base.metadata.create_all(database)
    with Session(database) as session:
        session.add_all(Cursor(consumer_id=number, message_id=0) for number in range(1, consumers + 1))
        session.commit()
    database.dispose()
