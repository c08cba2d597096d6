"""Traces by OpenTelemetry: where a record spent its time between `send`, the commit, and the consumer.

Off unless asked for, and then nothing of it runs: who can be traced gets a `Tracing` or None when it is made, and wraps
its own function only if there is one. The library is imported here alone, on demand (`pip install 'quivermq[otel]'`).

A record carries the context of the span that sent it in its header `traceparent`, as W3C Trace Context writes it, so
that nothing between a producer and a consumer has to know about traces. Only records of sampled traces have the header.
Tracing never fails a request: a header that is not a context is no context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from quiver.errors import ConfigError, QuiverError
from quiver.record import Batch, Headers

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Tracer

AsyncCall = Callable[..., Coroutine[Any, Any, Any]]

TRACEPARENT: Final = "traceparent"
BATCH_CONTEXTS_MAX: Final = 32
"""Spans of one append: a batch of many small requests belongs to as many traces."""
LINKS_MAX: Final = 128
"""Producers that one consuming span names; also the limit of OpenTelemetry's own SDK."""
_CONTEXT_BYTES: Final = 55
SCANNED_BYTES_MAX: Final = 1 << 20
"""Larger batches are not searched for contexts when they are appended, since that unpacks them."""

_MISSING: Final = "tracing needs OpenTelemetry, which is not installed: pip install 'quivermq[otel]'"


def open_tracing() -> Tracing:
    """Return a `Tracing` that uses the process's tracer provider.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        raise ConfigError(_MISSING) from None
    from quiver import __version__

    return Tracing(trace.get_tracer("quiver", __version__))


@contextmanager
def exporting(*, endpoint: str, node: int, samples_per_million: int) -> Iterator[None]:
    """Send the spans of this process to a collector, by OTLP over HTTP, until the context ends; then send the rest.

    An empty endpoint leaves it to `OTEL_EXPORTER_OTLP_ENDPOINT`, as all of OpenTelemetry's `OTEL_` variables count.

    Raises:
        ConfigError: the libraries are not installed.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError:
        raise ConfigError(_MISSING) from None
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(samples_per_million / 1_000_000),
        resource=Resource.create({"service.name": "quiver", "service.instance.id": str(node)}),
        shutdown_on_exit=False,
    )
    # Spans beyond the processor's queue are dropped: a collector that is slow or gone costs a node no memory.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


class Tracing:
    """Makes spans, and passes their contexts on with records."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._kinds = SpanKind
        self._propagator = TraceContextTextMapPropagator()

    # -- producers -------------------------------------------------------------------------------

    def trace_add(
        self, add: Callable[..., Any], topic: str, to_headers: Callable[[Any], Headers]
    ) -> Callable[..., Any]:
        """Return `ProducerCore.add` with a span for each record, which ends when its outcome is known."""

        def traced(value: Any, key: Any, partition: int | None, timestamp: int | None, headers: Any) -> Any:
            span = self._start(f"send {topic}", self._kinds.PRODUCER, topic, "send")
            if not span.is_recording():
                return add(value, key, partition, timestamp, headers)
            with _ending_on_error(span):
                given = () if headers is None else to_headers(headers)
                delivery = add(value, key, partition, timestamp, self.carry(span, given))
            if delivery is not None:  # without room the span is dropped: the record is added again, with a new one
                delivery.add_done_callback(lambda done: _end_sent(span, done.partition, done.offset, done.error))
            return delivery

        return traced

    def trace_extend(self, extend: Callable[..., Any], topic: str) -> Callable[..., Any]:
        """Return `Accumulator.extend` with one span for the values that it accepts together."""

        def traced(values: Any, partition: Any, key: Any, *, size_bytes: int, headers: Headers | None) -> Any:
            span = self._start(f"send {topic}", self._kinds.PRODUCER, topic, "send")
            if not span.is_recording():
                return extend(values, partition, key, size_bytes=size_bytes, headers=headers)
            span.set_attribute("messaging.batch.message_count", len(values))
            with _ending_on_error(span):
                carried = self.carry(span, headers or ())
                accepted = extend(values, partition, key, size_bytes=size_bytes, headers=carried)
            if accepted is not None:
                outcome, index = accepted
                outcome.add_callback(
                    lambda: _end_sent(span, outcome.partition, outcome.base_offset + index, outcome.error)
                )
            return accepted

        return traced

    # -- brokers ---------------------------------------------------------------------------------

    def trace_append(self, handle: AsyncCall) -> AsyncCall:
        """Return the handler of a produce request with a span, from its arrival to its commit, for each sender."""

        async def traced(caller: Any, request: Any, payload: memoryview) -> Any:
            contexts = self._find_contexts(payload)
            if not contexts:
                return await handle(caller, request, payload)
            attributes = {
                "messaging.system": "quiver",
                "messaging.destination.partition.id": str(request.partition_id),
                "quiver.topic_id": request.topic_id,
                "quiver.batch_bytes": len(payload),
            }
            spans = [self._tracer.start_span("append", one, attributes=attributes) for one in contexts]
            try:
                answer = await handle(caller, request, payload)
            except BaseException as error:
                for span in spans:
                    _end(span, error)
                raise
            for span in spans:
                span.set_attribute("quiver.base_offset", answer[0].base_offset)
                span.set_attribute("quiver.is_duplicate", answer[0].is_duplicate)
                span.end()
            return answer

        return traced

    def _find_contexts(self, payload: memoryview) -> list[Context]:
        """Return the different contexts of a batch's records; none if the batch is damaged, as nobody has checked."""
        try:
            batch = Batch.decode(payload, verify=False)
            if batch.header.raw_bytes > SCANNED_BYTES_MAX:
                return []
            return [self._extract(one) for one in islice(find_traceparents(batch.headers()), BATCH_CONTEXTS_MAX)]
        except QuiverError:
            return []

    # -- HTTP ------------------------------------------------------------------------------------

    def start_request(
        self, name: str, topic: str, operation: str, headers: Mapping[bytes, bytes]
    ) -> RequestSpan | None:
        """Return the span of an HTTP request, in the trace that its header names, if any; None if it is not sampled."""
        given = headers.get(TRACEPARENT.encode(), b"").decode("latin-1")
        span = self._start(name, self._kinds.SERVER, topic, operation, self._extract(given))
        return RequestSpan(span, self) if span.is_recording() else None

    # -- consumers -------------------------------------------------------------------------------

    def trace_consume(self, consume: AsyncCall) -> AsyncCall:
        """Return `ConsumerCore.consume` with a span for each topic that it returns records of."""

        async def traced(*arguments: Any, **options: Any) -> Any:
            began_ns = time.time_ns()
            slices = await consume(*arguments, **options)
            by_topic: dict[str, list[Iterable[Headers]]] = {}
            for reader, batch, first, end in slices:
                by_topic.setdefault(reader.topic, []).append(batch.headers(first, end))
            for topic, headers in by_topic.items():
                self._record_received(topic, chain.from_iterable(headers), began_ns)
            return slices

        return traced

    def trace_wait_batch(self, wait_batch: AsyncCall) -> AsyncCall:
        """Return `AsyncConsumer.wait_batch` with a span for each batch."""

        async def traced() -> Any:
            began_ns = time.time_ns()
            found = await wait_batch()
            if found is not None:
                reader, batch = found
                self._record_received(reader.topic, batch.headers(reader.position), began_ns)
            return found

        return traced

    def _record_received(self, topic: str, headers: Iterable[Headers], began_ns: int) -> None:
        """Record a span that links to those that sent the records; none if no record names one."""
        found = (self.link(one) for one in islice(find_traceparents(headers), LINKS_MAX))
        if links := [link for link in found if link is not None]:
            name, kind = f"receive {topic}", self._kinds.CONSUMER
            self._start(name, kind, topic, "receive", links=links, start_time=began_ns).end()

    # -- contexts --------------------------------------------------------------------------------

    def carry(self, span: Span, headers: Headers) -> Headers:
        """Return headers with the context of a span, in place of an earlier one."""
        return (*(pair for pair in headers if pair[0] != TRACEPARENT), (TRACEPARENT, format_context(span).encode()))

    def link(self, traceparent: str) -> Link | None:
        """Return a link to the span of a context; None if it is not one."""
        from opentelemetry.trace import Link, get_current_span

        context = get_current_span(self._extract(traceparent)).get_span_context()
        return Link(context) if context.is_valid else None

    def _extract(self, traceparent: str) -> Context:
        from opentelemetry.context import Context

        return self._propagator.extract({TRACEPARENT: traceparent}, Context())

    def _start(
        self,
        name: str,
        kind: SpanKind,
        topic: str,
        operation: str,
        context: Context | None = None,
        **options: Any,
    ) -> Span:
        attributes = {
            "messaging.system": "quiver",
            "messaging.operation.type": operation,
            "messaging.destination.name": topic,
        }
        return self._tracer.start_span(name, context, kind=kind, attributes=attributes, **options)


class RequestSpan:
    """The span of an HTTP request."""

    def __init__(self, span: Span, tracing: Tracing) -> None:
        self._span = span
        self._tracing = tracing
        self.traceparent = format_context(span)

    def link(self, traceparents: Iterable[str]) -> None:
        """Link it to the spans that sent what it returns."""
        for one in islice(dict.fromkeys(traceparents), LINKS_MAX):
            if (link := self._tracing.link(one)) is not None:
                self._span.add_link(link.context)

    def finish(self, *, status: int, error_code: str) -> None:
        """End it with the status of the response; 0 if there was none."""
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if error_code:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error_code)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        _end(self._span, error)


def find_traceparents(headers: Iterable[Headers]) -> Iterator[str]:
    """Yield the different contexts in the headers of records; what has another length is none."""
    seen: set[bytes] = set()
    for pairs in headers:
        for name, value in pairs:
            if name == TRACEPARENT and value is not None and len(value) == _CONTEXT_BYTES and value not in seen:
                seen.add(value)
                yield value.decode("latin-1")


def format_context(span: Span) -> str:
    """Return the context of a span as W3C Trace Context writes it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@contextmanager
def _ending_on_error(span: Span) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _end(span, error)
        raise


def _end_sent(span: Span, partition: int, offset: int | None, error: BaseException | None) -> None:
    span.set_attribute("messaging.destination.partition.id", str(partition))
    if offset is not None and error is None:
        span.set_attribute("quiver.offset", offset)
    _end(span, error)


def _end(span: Span, error: BaseException | None) -> None:
    """End a span; an error is what Quiver's own errors say of themselves: a code, and whether it was done."""
    if error is not None:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, str(error)[:200])
        if isinstance(error, QuiverError):
            span.set_attribute("error.type", error.code)
            span.set_attribute("quiver.outcome", error.outcome)
        else:
            span.set_attribute("error.type", type(error).__name__)
    span.end()
