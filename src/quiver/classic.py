"""The small HTTP-only library: `Producer` and `Consumer` as programs have used them for long, made to survive crashes.

It needs nothing but the standard library and imports nothing else of Quiver, so that this one file can be copied into a
program. Each call goes to one of the given addresses; if that node does not answer, or answers *not done*, the call is
repeated at the next address until `max_timeout` is over.

An interrupted call is safe to repeat, and is repeated: messages carry a sequence number, by which a partition
deduplicates them, and are consumed by partition and offset, which name one message. So no message is lost or duplicated
when nodes crash or answers get lost.

    producer = Producer(name="web-1")
    producer.RegisterProducer("logs")
    producer.Enqueue("logs", "hello")

    consumer = Consumer()
    consumer.RegisterConsumer("logs")
    print(consumer.Dequeue("logs"), consumer.Size("logs"))
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import urlencode, urlsplit

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "http://127.0.0.1:8002"
CALL_TIMEOUT_S = 10.0
"""Timeout of one node's answer; after it, the call is repeated at the next address."""
RETRY_DELAY_S = 0.1
"""Wait after all addresses were tried in vain."""
PARTITIONS_AGE_S = 5.0
"""How long a topic's partitions are taken for known while there is nothing to consume."""
CURSOR_TRIES = 50
"""How often a cursor is looked for between two looks at the partition's end that must be the same."""

FAILURE_STATUS = 400
PASSING_STATUSES = (429, 503, 504, 507)
"""Answers that say: not now, or not known; all others that are failures stay what they are."""

Json = dict[str, Any]


class myProducerError(Exception):  # noqa: N801 - the name that programs catch
    """A producer's call failed; `code` and `outcome` ("not_done" or "unknown") are the cluster's."""

    def __init__(self, message: str, code: str = "error", outcome: str = "not_done") -> None:
        super().__init__(message)
        self.code = code
        self.outcome = outcome


class myConsumerError(Exception):  # noqa: N801 - the name that programs catch
    """A consumer's call failed; the code is `empty` if there is nothing to consume."""

    def __init__(self, message: str, code: str = "error", outcome: str = "not_done") -> None:
        super().__init__(message)
        self.code = code
        self.outcome = outcome


class _CallError(Exception):
    """A call failed: whether the same may succeed later or elsewhere, and whether it was perhaps carried out."""

    def __init__(self, message: str, code: str, *, is_worth_a_try: bool, is_perhaps_done: bool) -> None:
        super().__init__(message)
        self.code = code
        self.is_worth_a_try = is_worth_a_try
        self.is_perhaps_done = is_perhaps_done

    @property
    def outcome(self) -> str:
        return "unknown" if self.is_perhaps_done else "not_done"


class _Http:
    """Calls to whichever node answers; one connection for each thread."""

    def __init__(self, addresses: str | Iterable[str], max_timeout: float) -> None:
        texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
        self._addresses = [_parse_address(text.strip()) for text in texts if text.strip()]
        if not self._addresses:
            raise ValueError("give at least one address, such as http://127.0.0.1:8002")
        self._max_timeout = max_timeout
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self.close = weakref.finalize(self, _close_all, self._connections)
        """Close all connections; also called when the object is garbage collected."""

    def call(self, method: str, path: str, parameters: Json) -> Json | None:
        """Return what a node answers, None for no content; ask the next one, and again, while that may help.

        Everything that is asked may be asked twice: registering again is harmless, and the rest says which message it
        means.
        """
        deadline = time.monotonic() + self._max_timeout
        is_perhaps_done = False
        for number in count(1):
            try:
                return self._try(method, path, parameters, min(CALL_TIMEOUT_S, max(0.1, deadline - time.monotonic())))
            except _CallError as error:
                is_perhaps_done = is_perhaps_done or (error.is_perhaps_done and method != "GET")
                error.is_perhaps_done = is_perhaps_done
                delay = RETRY_DELAY_S if number % len(self._addresses) == 0 else 0.0
                if not error.is_worth_a_try or time.monotonic() + delay >= deadline:
                    raise
            self.move_on()
            time.sleep(delay)
        raise AssertionError("counting never ends")

    def _try(self, method: str, path: str, parameters: Json, timeout: float) -> Json | None:
        """Ask one node, once."""
        try:
            status, answer = self._ask(method, path, parameters, timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_sent = not isinstance(error, ConnectionRefusedError)
            raise _CallError(
                f"no answer: {error!r}", "unavailable", is_worth_a_try=True, is_perhaps_done=is_sent
            ) from error
        if status < FAILURE_STATUS:
            return answer
        told = answer or {}
        raise _CallError(
            str(told.get("message", f"status {status}")),
            str(told.get("code", status)),
            is_worth_a_try=status in PASSING_STATUSES,
            is_perhaps_done=told.get("outcome") == "unknown",
        )

    def _ask(self, method: str, path: str, parameters: Json, timeout: float) -> tuple[int, Json | None]:
        connection = self._connection(timeout)
        if method == "GET":
            connection.request("GET", f"{path}?{urlencode(parameters)}" if parameters else path)
        else:
            connection.request(method, path, json.dumps(parameters).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        answer = json.loads(body) if body else None
        if answer is not None and not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return response.status, answer

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            host, port = self._addresses[getattr(self._own, "turn", 0) % len(self._addresses)]
            connection = self._own.connection = http.client.HTTPConnection(host, port)
            self._connections.append(connection)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def move_on(self) -> None:
        """End this thread's connection; its next call goes to the next address."""
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._connections.remove(connection)
            self._own.connection = None
        self._own.turn = getattr(self._own, "turn", 0) + 1


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()


class _Topic:
    """What is known of a topic that a producer or consumer is registered for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.id = -1
        self.epoch = 0
        self.partitions: list[int] = []
        self.partitions_known_at = 0.0
        self.next: dict[int, int] = {}
        """By partition: the next sequence of a producer, the next offset of a consumer."""
        self.turn = 0
        self.is_in_doubt = False
        """Whether a message was given up although it may be there: the sequences must be asked for."""


class Producer:
    """Enqueue messages. Safe to use from several threads.

    `name` lets a restarted program go on as the same producer; without one it gets a name of its own. `max_timeout` is
    how many seconds a call may take, all its tries together.
    """

    def __init__(
        self,
        addresses: str | Iterable[str] = DEFAULT_ADDRESS,
        *,
        name: str | None = None,
        max_timeout: float = 60.0,
    ) -> None:
        self.name = name or f"classic-{uuid.uuid4().hex}"
        self._http = _Http(addresses, max_timeout)
        self._topics: dict[str, _Topic] = {}

    def CreateTopic(self, topic: str, partitions: int | None = None) -> int:  # noqa: N802 - the name that programs call
        """Create a topic; return 0. Raises `myProducerError` if it exists."""
        parameters: Json = (
            {"topic_name": topic} if partitions is None else {"topic_name": topic, "partitions": partitions}
        )
        try:
            self._call("POST", "/topics", parameters)
        except myProducerError as error:
            if error.code == "topic_exists" and error.outcome == "unknown":
                return 0  # by an earlier try of this very call, as far as anybody can tell
            raise
        return 0

    def ListTopics(self) -> list[str]:  # noqa: N802 - as above
        """Return the names of all topics."""
        return list(self._call("GET", "/topics", {})["topics"])

    def RegisterProducer(self, topic: str) -> int:  # noqa: N802 - as above
        """Register for a topic, which is created if there is none; return the producer's id in it."""
        known = self._topics.setdefault(topic, _Topic())
        with known.lock:
            self._register(topic, known)
            return known.id

    def Enqueue(self, topic: str, message: str | bytes, partition_id: int | None = None) -> int:  # noqa: N802 - as above
        """Enqueue a message once, however often it must be sent; return 0 when it is safe.

        Without a partition, partitions take turns. Raises `myProducerError`; if its outcome is `unknown`, the message
        may have been enqueued.
        """
        known = self._topics.get(topic)
        if known is None:
            raise myProducerError(f"register for topic {topic!r} first", "not_registered")
        with known.lock:
            if known.is_in_doubt:
                self._register(topic, known)
            if partition_id is None:
                known.turn += 1
                partition_id = known.partitions[known.turn % len(known.partitions)]
            self._send(topic, known, partition_id, message)
        return 0

    def close(self) -> None:
        """End the connections; nothing can be asked afterwards."""
        self._http.close()

    def _register(self, topic: str, known: _Topic) -> None:
        # A name of its own in each topic: to register a name again fences off what it sends under its older epoch.
        answer = self._call("POST", "/producer/register", {"topic": topic, "prod_name": f"{self.name}/{topic}"})
        partitions = self._call("GET", "/partitions", {"topic": topic})["partitions"]
        known.id, known.epoch = int(answer["producer_id"]), int(answer["epoch"])
        known.partitions = [int(partition["partition_id"]) for partition in partitions]
        known.next = {int(partition): int(sequence) for partition, sequence in answer["sequences"].items()}
        known.is_in_doubt = False

    def _send(self, topic: str, known: _Topic, partition_id: int, message: str | bytes) -> None:
        sequence = known.next.get(partition_id, 0)
        parameters = {
            "topic": topic,
            "producer_id": known.id,
            "epoch": known.epoch,
            "partition_id": partition_id,
            "sequence": sequence,
            **_encode_message(message),
        }
        try:
            self._call("POST", "/producer/produce", parameters)
        except myProducerError as error:
            # Whatever is the matter, the cluster knows best how far this producer has come.
            known.is_in_doubt = error.outcome == "unknown" or error.code == "out_of_sequence"
            raise
        known.next[partition_id] = sequence + 1

    def _call(self, method: str, path: str, parameters: Json) -> Json:
        try:
            return self._http.call(method, path, parameters) or {}
        except _CallError as error:
            raise myProducerError(str(error), error.code, error.outcome) from error.__cause__


class Consumer:
    """Dequeue messages. Safe to use from several threads.

    `consumer_id` lets a restarted program go on as the same consumer. `run` polls every topic that was registered for:
    it waits `poll_time` seconds when there was nothing, `poll_time_after_error` after an error, and ends when nothing
    came for `timeout` seconds (None: never). `max_timeout` is how many seconds a call may take, all its tries together.
    """

    def __init__(
        self,
        addresses: str | Iterable[str] = DEFAULT_ADDRESS,
        *,
        consumer_id: int | None = None,
        timeout: float | None = None,
        poll_time: float = 0.1,
        poll_time_after_error: float = 1.0,
        max_timeout: float = 60.0,
    ) -> None:
        self.consumer_id = consumer_id
        self._is_resumed = consumer_id is not None
        self._timeout, self._poll_time, self._poll_time_after_error = timeout, poll_time, poll_time_after_error
        self._http = _Http(addresses, max_timeout)
        self._topics: dict[str, _Topic] = {}
        self._registering = threading.Lock()
        self._stopping = threading.Event()

    def ListTopics(self) -> list[str]:  # noqa: N802 - the name that programs call
        """Return the names of all topics."""
        return list(self._call("GET", "/topics", {})["topics"])

    def RegisterConsumer(self, topic: str) -> int:  # noqa: N802 - as above
        """Register for a topic, from its beginning; return the consumer's id, one for all topics."""
        with self._registering:
            parameters: Json = {"topic": topic}
            if self.consumer_id is not None:
                parameters["consumer_id"] = self.consumer_id
            answer = self._call("POST", "/consumer/register", parameters)
            self.consumer_id = int(answer["consumer_id"])
            known = self._topics.setdefault(topic, _Topic())
            known.id = self.consumer_id
            return self.consumer_id

    def Dequeue(self, topic: str, partition_id: int | None = None) -> str:  # noqa: N802 - as above
        """Return the next message that this consumer has not had; partitions take turns.

        Raises:
            myConsumerError: there is none (`empty`), or the call failed: then the same message comes with the next one.
        """
        known = self._known(topic)
        with known.lock:
            for partition in [partition_id] if partition_id is not None else self._take_turns(topic, known):
                message = self._take(topic, known, partition)
                if message is not None:
                    return message
        raise myConsumerError(f"there is nothing to consume in {topic!r}", "empty")

    def Size(self, topic: str) -> int:  # noqa: N802 - as above
        """Return how many messages of a topic this consumer has not had."""
        known = self._known(topic)
        return int(self._call("GET", "/size", {"topic": topic, "consumer_id": known.id})["size"])

    def run(
        self,
        on_message: Callable[[str, str], object] | None = None,
        *,
        timeout: float | None = None,
        poll_time: float | None = None,
        poll_time_after_error: float | None = None,
    ) -> dict[str, list[str]]:
        """Poll all topics that were registered for, in parallel, until `stop`, or until nothing came for `timeout`.

        Each message is given to `on_message(topic, message)`; without one, all messages are returned by topic. What is
        given here replaces what the consumer was made with.
        """
        self._stopping.clear()
        timeout = self._timeout if timeout is None else timeout
        poll_time = self._poll_time if poll_time is None else poll_time
        after_error = self._poll_time_after_error if poll_time_after_error is None else poll_time_after_error
        found: dict[str, list[str]] = {topic: [] for topic in self._topics}

        def poll(topic: str) -> None:
            take = on_message or (lambda topic, message: found[topic].append(message))
            self._poll(topic, take, timeout=timeout, poll_time=poll_time, after_error=after_error)

        if found:
            with ThreadPoolExecutor(len(found), "quiver-consumer") as pool:
                list(pool.map(poll, found))
        return found

    def stop(self) -> None:
        """Let `run` end after the messages at hand; callable from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """End the connections; nothing can be asked afterwards."""
        self._http.close()

    def _poll(
        self,
        topic: str,
        take: Callable[[str, str], object],
        *,
        timeout: float | None,
        poll_time: float,
        after_error: float,
    ) -> None:
        heard_at = time.monotonic()
        while not self._stopping.is_set() and (timeout is None or time.monotonic() - heard_at < timeout):
            try:
                message = self.Dequeue(topic)
            except myConsumerError as error:
                if error.code != "empty":
                    logger.warning("polling %r failed: %s", topic, error)
                self._stopping.wait(poll_time if error.code == "empty" else after_error)
                continue
            heard_at = time.monotonic()
            take(topic, message)
        self._http.move_on()

    def _known(self, topic: str) -> _Topic:
        known = self._topics.get(topic)
        if known is None:
            raise myConsumerError(f"register for topic {topic!r} first", "not_registered")
        return known

    def _take_turns(self, topic: str, known: _Topic) -> list[int]:
        """Return the partitions, the next one in turn first; look for new ones now and then."""
        if time.monotonic() - known.partitions_known_at > PARTITIONS_AGE_S or not known.partitions:
            partitions = self._call("GET", "/partitions", {"topic": topic})["partitions"]
            known.partitions = [int(partition["partition_id"]) for partition in partitions]
            known.partitions_known_at = time.monotonic()
        known.turn = (known.turn + 1) % len(known.partitions)
        return known.partitions[known.turn :] + known.partitions[: known.turn]

    def _take(self, topic: str, known: _Topic, partition_id: int) -> str | None:
        """Return the message at the consumer's place in a partition, and go past it; None if there is none."""
        if partition_id not in known.next:
            known.next[partition_id] = self._find_cursor(topic, known, partition_id)
        parameters = {
            "topic": topic,
            "consumer_id": known.id,
            "partition_id": partition_id,
            "offset": known.next[partition_id],
        }
        try:
            answer = self._http.call("GET", "/consumer/consume", parameters)
        except _CallError as error:
            if error.code == "trimmed":
                del known.next[partition_id]  # retention was quicker: begin again where records begin
            raise myConsumerError(str(error), error.code, error.outcome) from error.__cause__
        if answer is None:
            return None
        known.next[partition_id] = int(answer["offset"]) + 1
        return _decode_message(answer)

    def _find_cursor(self, topic: str, known: _Topic, partition_id: int) -> int:
        """Return a consumer's place: where a partition begins, or, resumed, as far before its end as the rest is long.

        The end is looked at before and after the rest is asked for: if it is the same, both belong together.
        """
        first, end = self._bounds(topic, partition_id)
        if not self._is_resumed:
            return first
        for _ in range(CURSOR_TRIES):
            parameters = {"topic": topic, "consumer_id": known.id, "partition_id": partition_id}
            size = int(self._call("GET", "/size", parameters)["size"])
            before, (first, end) = end, self._bounds(topic, partition_id)
            if before == end:
                return max(first, end - size)
        raise myConsumerError(f"the place in {topic!r} was not found while much is produced", "busy")

    def _bounds(self, topic: str, partition_id: int) -> tuple[int, int]:
        """Return a partition's first offset and its end."""
        partitions = self._call("GET", f"/topics/{topic}", {})["partitions"]
        for partition in partitions:
            if int(partition["partition_id"]) == partition_id and partition["end_offset"] is not None:
                return int(partition["first_offset"] or 0), int(partition["end_offset"])
        raise myConsumerError(f"partition {partition_id} of {topic!r} has no leader now", "unavailable")

    def _call(self, method: str, path: str, parameters: Json) -> Json:
        try:
            return self._http.call(method, path, parameters) or {}
        except _CallError as error:
            raise myConsumerError(str(error), error.code, error.outcome) from error.__cause__


def _parse_address(text: str) -> tuple[str, int]:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"an address is http://host:port, not {text!r}")
    return parts.hostname, parts.port or 8002


def _encode_message(message: str | bytes) -> Json:
    if isinstance(message, str):
        return {"message": message}
    return {"message_b64": base64.b64encode(message).decode("ascii")}


def _decode_message(answer: Json) -> str:
    """Return a message as text; bytes that are none are shown with escapes."""
    if "message_b64" not in answer:
        return str(answer.get("message") or "")
    return base64.b64decode(answer["message_b64"]).decode("utf-8", "backslashreplace")
