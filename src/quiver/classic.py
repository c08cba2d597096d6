"""The small HTTP-only library: `Producer` and `Consumer` with their established interface, safe against crashes.

It uses only the standard library, so that this one file can be copied into a program; where Quiver is installed,
`quiver.contexts` finds the cluster if no address is given, as for every other client. Each call goes to one of the
addresses; if that node does not answer, or answers *not done*, the call is repeated at the next address until
`max_timeout` is over.

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
import ssl
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
"""Wait after all addresses have failed."""
PARTITIONS_AGE_S = 5.0
"""Age at which the list of a topic's partitions is read again."""
CURSOR_TRIES = 50
"""Attempts to read a cursor while no record is appended; see `Consumer._find_cursor`."""

FAILURE_STATUS = 400
UNAUTHENTICATED_STATUS = 401
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
RETRYABLE_STATUSES = (429, 503, 504, 507)
"""Statuses of failures that may be temporary; every other failure is permanent."""

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
    """A call failed; whether a retry may succeed, and whether it may have been done."""

    def __init__(self, message: str, code: str, *, is_retryable: bool, is_outcome_unknown: bool) -> None:
        super().__init__(message)
        self.code = code
        self.is_retryable = is_retryable
        self.is_outcome_unknown = is_outcome_unknown

    @property
    def outcome(self) -> str:
        return "unknown" if self.is_outcome_unknown else "not_done"


class _Http:
    """Calls to any node that answers; one connection per thread."""

    def __init__(
        self, addresses: str | Iterable[str] | None, max_timeout: float, *, ca_file: str, token: str, token_file: str
    ) -> None:
        texts, self._tls, self._load_token = _find_cluster(addresses, ca_file, token=token, token_file=token_file)
        self._token = "" if self._load_token is None else self._load_token()
        self._addresses = [_parse_address(text) for text in texts]
        self._max_timeout = max_timeout
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self.close = weakref.finalize(self, _close_all, self._connections)
        """Close all connections; also called when the object is garbage collected."""

    def call(self, method: str, path: str, parameters: Json) -> Json | None:
        """Return a node's answer, None for no content; after a retryable failure, repeat the call at the next address.

        Every call is safe to repeat: a repeated registration is harmless, and the other calls name their message by
        sequence or offset.
        """
        deadline = time.monotonic() + self._max_timeout
        is_outcome_unknown = False
        for number in count(1):
            try:
                return self._try(method, path, parameters, min(CALL_TIMEOUT_S, max(0.1, deadline - time.monotonic())))
            except _CallError as error:
                # Once an attempt may have been done, a later failure does not make the call "not done".
                is_outcome_unknown = is_outcome_unknown or (error.is_outcome_unknown and method != "GET")
                error.is_outcome_unknown = is_outcome_unknown
                delay = RETRY_DELAY_S if number % len(self._addresses) == 0 else 0.0
                if not error.is_retryable or time.monotonic() + delay >= deadline:
                    raise
            self.use_next_address()
            time.sleep(delay)
        raise AssertionError("unreachable")

    def _try(self, method: str, path: str, parameters: Json, timeout: float) -> Json | None:
        """Make one attempt at the current address."""
        try:
            status, answer = self._send_request(method, path, parameters, timeout)
            if status == UNAUTHENTICATED_STATUS and self._reload_token():
                status, answer = self._send_request(method, path, parameters, timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_sent = not isinstance(error, ConnectionRefusedError)
            raise _CallError(
                f"no answer: {error!r}", "unavailable", is_retryable=True, is_outcome_unknown=is_sent
            ) from error
        if status < FAILURE_STATUS:
            return answer
        failure = answer or {}
        raise _CallError(
            str(failure.get("message", f"status {status}")),
            str(failure.get("code", status)),
            is_retryable=status in RETRYABLE_STATUSES,
            is_outcome_unknown=failure.get("outcome") == "unknown",
        )

    def _send_request(self, method: str, path: str, parameters: Json, timeout: float) -> tuple[int, Json | None]:
        connection = self._connection(timeout)
        fields = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        if method == "GET":
            connection.request("GET", f"{path}?{urlencode(parameters)}" if parameters else path, headers=fields)
        else:
            fields["Content-Type"] = "application/json"
            connection.request(method, path, json.dumps(parameters).encode(), fields)
        response = connection.getresponse()
        body = response.read()
        answer = json.loads(body) if body else None
        if answer is not None and not isinstance(answer, dict):
            raise ValueError("the answer is not a JSON object")
        return response.status, answer

    def _reload_token(self) -> bool:
        """Read the token again; return whether it is another one: a rotated one replaces one that was revoked."""
        refused, self._token = self._token, "" if self._load_token is None else self._load_token()
        return self._token != refused

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            host, port = self._addresses[getattr(self._own, "turn", 0) % len(self._addresses)]
            connection = self._own.connection = (
                http.client.HTTPConnection(host, port)
                if self._tls is None
                else http.client.HTTPSConnection(host, port, context=self._tls)
            )
            self._connections.append(connection)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def use_next_address(self) -> None:
        """Close this thread's connection; its next call uses the next address."""
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
    """State of a topic that a producer or consumer is registered for."""

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
        """Whether a call failed with an unknown outcome: the sequences must be read from the cluster again."""


class Producer:
    """Enqueue messages. Safe to use from several threads.

    With the same `name`, a restarted program continues as the same producer; without one it gets a unique name.
    `max_timeout` is the timeout of a call in seconds, all its attempts included. `ca_file` verifies the certificates of
    `https://` addresses. `token`, or the content of `token_file`, says who this program is.
    """

    def __init__(
        self,
        addresses: str | Iterable[str] | None = None,
        *,
        name: str | None = None,
        max_timeout: float = 60.0,
        ca_file: str = "",
        token: str = "",
        token_file: str = "",
    ) -> None:
        self.name = name or f"classic-{uuid.uuid4().hex}"
        self._http = _Http(addresses, max_timeout, ca_file=ca_file, token=token, token_file=token_file)
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
                return 0  # an earlier attempt of this call may have created it
            raise
        return 0

    def ListTopics(self) -> list[str]:  # noqa: N802 - as above
        """Return the names of all topics."""
        return list(self._call("GET", "/topics", {})["topics"])

    def RegisterProducer(self, topic: str) -> int:  # noqa: N802 - as above
        """Register for a topic, which is created if it does not exist; return the producer's id in it."""
        known = self._topics.setdefault(topic, _Topic())
        with known.lock:
            self._register(topic, known)
            return known.id

    def Enqueue(self, topic: str, message: str | bytes, partition_id: int | None = None) -> int:  # noqa: N802 - as above
        """Enqueue a message exactly once, even if it is sent several times; return 0 when it is committed.

        Without a partition, partitions are used in rotation. Raises `myProducerError`; if its outcome is
        `unknown`, the message may have been enqueued.
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
        """Close the connections; no call is possible afterwards."""
        self._http.close()

    def _register(self, topic: str, known: _Topic) -> None:
        # One name per topic: registering a name again fences its older epoch, in all topics.
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
            # This producer's next sequence is no longer certain: read it from the cluster before the next message.
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

    With its `consumer_id`, a restarted program continues as the same consumer. `run` polls every registered topic: it
    waits `poll_time` seconds if there is no message, `poll_time_after_error` after an error, and ends if no message
    arrives for `timeout` seconds (None: never). `max_timeout` is the timeout of a call in seconds, all its attempts
    included. `ca_file` verifies the certificates of `https://` addresses. `token`, or the content of `token_file`, says
    who this program is.
    """

    def __init__(
        self,
        addresses: str | Iterable[str] | None = None,
        *,
        consumer_id: int | None = None,
        timeout: float | None = None,
        poll_time: float = 0.1,
        poll_time_after_error: float = 1.0,
        max_timeout: float = 60.0,
        ca_file: str = "",
        token: str = "",
        token_file: str = "",
    ) -> None:
        self.consumer_id = consumer_id
        self._is_resumed = consumer_id is not None
        self._timeout, self._poll_time, self._poll_time_after_error = timeout, poll_time, poll_time_after_error
        self._http = _Http(addresses, max_timeout, ca_file=ca_file, token=token, token_file=token_file)
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
        """Return the next message for this consumer; without a partition, partitions are used in rotation.

        Raises:
            myConsumerError: there is none (`empty`), or the call failed; then the next call returns the same message.
        """
        known = self._known(topic)
        with known.lock:
            for partition in [partition_id] if partition_id is not None else self._rotate_partitions(topic, known):
                message = self._consume(topic, known, partition)
                if message is not None:
                    return message
        raise myConsumerError(f"no message to consume in {topic!r}", "empty")

    def Size(self, topic: str) -> int:  # noqa: N802 - as above
        """Return how many messages of a topic this consumer has not consumed."""
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
        """Poll all registered topics in parallel until `stop`, or until no message arrives for `timeout`.

        Each message is passed to `on_message(topic, message)`; without it, all messages are returned by topic. The
        other arguments override those of the constructor.
        """
        self._stopping.clear()
        timeout = self._timeout if timeout is None else timeout
        poll_time = self._poll_time if poll_time is None else poll_time
        after_error = self._poll_time_after_error if poll_time_after_error is None else poll_time_after_error
        found: dict[str, list[str]] = {topic: [] for topic in self._topics}

        def poll(topic: str) -> None:
            handle = on_message or (lambda topic, message: found[topic].append(message))
            self._poll(topic, handle, timeout=timeout, poll_time=poll_time, after_error=after_error)

        if found:
            with ThreadPoolExecutor(len(found), "quiver-consumer") as pool:
                list(pool.map(poll, found))
        return found

    def stop(self) -> None:
        """Let `run` end after the current messages; callable from any thread."""
        self._stopping.set()

    def close(self) -> None:
        """Close the connections; no call is possible afterwards."""
        self._http.close()

    def _poll(
        self,
        topic: str,
        handle: Callable[[str, str], object],
        *,
        timeout: float | None,
        poll_time: float,
        after_error: float,
    ) -> None:
        received_at = time.monotonic()
        while not self._stopping.is_set() and (timeout is None or time.monotonic() - received_at < timeout):
            try:
                message = self.Dequeue(topic)
            except myConsumerError as error:
                if error.code != "empty":
                    logger.warning("polling %r failed: %s", topic, error)
                self._stopping.wait(poll_time if error.code == "empty" else after_error)
                continue
            received_at = time.monotonic()
            handle(topic, message)
        self._http.use_next_address()

    def _known(self, topic: str) -> _Topic:
        known = self._topics.get(topic)
        if known is None:
            raise myConsumerError(f"register for topic {topic!r} first", "not_registered")
        return known

    def _rotate_partitions(self, topic: str, known: _Topic) -> list[int]:
        """Return the partitions, starting with the next in rotation; read the list again after `PARTITIONS_AGE_S`."""
        if time.monotonic() - known.partitions_known_at > PARTITIONS_AGE_S or not known.partitions:
            partitions = self._call("GET", "/partitions", {"topic": topic})["partitions"]
            known.partitions = [int(partition["partition_id"]) for partition in partitions]
            known.partitions_known_at = time.monotonic()
        known.turn = (known.turn + 1) % len(known.partitions)
        return known.partitions[known.turn :] + known.partitions[: known.turn]

    def _consume(self, topic: str, known: _Topic, partition_id: int) -> str | None:
        """Return the message at the consumer's cursor in a partition and advance the cursor; None if there is none."""
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
                del known.next[partition_id]  # removed by retention: continue at the partition's first record
            raise myConsumerError(str(error), error.code, error.outcome) from error.__cause__
        if answer is None:
            return None
        known.next[partition_id] = int(answer["offset"]) + 1
        return _decode_message(answer)

    def _find_cursor(self, topic: str, known: _Topic, partition_id: int) -> int:
        """Return a consumer's cursor: the partition's first offset; for a resumed consumer, its end minus `Size`.

        The end is read before and after the size: only if it has not changed, the two are consistent.
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
        raise myConsumerError(
            f"not done: the cursor in partition {partition_id} of {topic!r} was not found, because records are being "
            "appended; try again",
            "busy",
        )

    def _bounds(self, topic: str, partition_id: int) -> tuple[int, int]:
        """Return a partition's first offset and its end."""
        partitions = self._call("GET", f"/topics/{topic}", {})["partitions"]
        for partition in partitions:
            if int(partition["partition_id"]) == partition_id and partition["end_offset"] is not None:
                return int(partition["first_offset"] or 0), int(partition["end_offset"])
        raise myConsumerError(
            f"not done: partition {partition_id} of {topic!r} has no leader; try again", "unavailable"
        )

    def _call(self, method: str, path: str, parameters: Json) -> Json:
        try:
            return self._http.call(method, path, parameters) or {}
        except _CallError as error:
            raise myConsumerError(str(error), error.code, error.outcome) from error.__cause__


def _find_cluster(
    addresses: str | Iterable[str] | None, ca_file: str, *, token: str = "", token_file: str = ""
) -> tuple[list[str], ssl.SSLContext | None, Callable[[], str] | None]:
    """Return addresses, the TLS context of their connections, and what loads the token.

    `https://` is never plain text, and a token is never sent in plain text to another machine.
    """
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    texts = None if given is None else [text.strip() for text in given if text.strip()]
    if texts == []:
        raise ValueError("give at least one address, such as http://127.0.0.1:8002")
    certificate_file = key_file = ""
    load_token: Callable[[], str] | None = None
    try:
        from quiver.contexts import find_credentials, resolve
    except ImportError:  # this file was copied into a program: neither environment nor contexts are known
        texts = texts or [DEFAULT_ADDRESS]
        is_tls = bool(ca_file) or any(text.lower().startswith("https://") for text in texts)
        load_token = _check_token(texts, token, token_file, is_tls=is_tls)
    else:
        target = resolve(texts, ca_file=ca_file, token_file=token_file)
        texts, is_tls, ca_file = list(target.addresses), target.is_tls, target.ca_file
        certificate_file, key_file = target.certificate_file, target.key_file
        if not token and (target.user or target.password_file):
            raise ValueError("HTTP takes tokens, not passwords: pass token_file, or set QUIVER_TOKEN_FILE")
        source = find_credentials(target, token=token)
        load_token = None if source is None else lambda: source.load().reveal()
    if not is_tls:
        return texts, None, load_token
    context = ssl.create_default_context(cafile=ca_file or None)
    if certificate_file:
        context.load_cert_chain(certificate_file, key_file or None)
    return texts, context, load_token


def _check_token(texts: list[str], token: str, token_file: str, *, is_tls: bool) -> Callable[[], str] | None:
    """Return what loads the token of a copy of this file, which cannot read and check token files."""
    if token_file:
        raise ValueError("token_file needs Quiver to be installed: pip install quivermq, or pass token")
    if token and not is_tls and any(_parse_address(text)[0] not in LOOPBACK_HOSTS for text in texts):
        raise ValueError("a token is never sent in plain text to another machine: use https:// addresses")
    return (lambda: token) if token else None


def _parse_address(text: str) -> tuple[str, int]:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"the address {text!r} is not valid; use http://host:port or https://host:port")
    return parts.hostname, parts.port or 8002


def _encode_message(message: str | bytes) -> Json:
    if isinstance(message, str):
        return {"message": message}
    return {"message_b64": base64.b64encode(message).decode("ascii")}


def _decode_message(answer: Json) -> str:
    """Return a message as text; bytes that are not valid UTF-8 are escaped."""
    if "message_b64" not in answer:
        return str(answer.get("message") or "")
    return base64.b64decode(answer["message_b64"]).decode("utf-8", "backslashreplace")
