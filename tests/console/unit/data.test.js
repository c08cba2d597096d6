import assert from "node:assert/strict";
import test from "node:test";

import { WrittenNumber, keep, keepNumber, mergeRanges, parseJson, toNextQuery, toQuery } from "../../../src/quiver/gateway/console/static/browse.js";
import { Columns, HISTORY_MS, History, POINTS_MAX, Steps } from "../../../src/quiver/gateway/console/static/history.js";
import { EventParser } from "../../../src/quiver/gateway/console/static/live.js";
import { placement, skew } from "../../../src/quiver/gateway/console/static/partitions.js";
import { refreshMs, sortRows, visibleRows } from "../../../src/quiver/gateway/console/static/ui.js";

const rounded = (values) => values.map((value) => value && Math.round(value * 1000) / 1000);

test("events are found wherever the stream is cut, and comments are none", () => {
  const bytes = new TextEncoder().encode(': waiting\n\nevent: update\ndata: {"a":"é"}\n\nevent: x\ndata: 1\n\n');
  for (let cut = 0; cut <= bytes.length; cut += 1) {
    const parser = new EventParser();
    const found = [...parser.feed(bytes.subarray(0, cut)), ...parser.feed(bytes.subarray(cut))];
    assert.deepEqual(found, [{ name: "update", data: '{"a":"é"}' }, { name: "x", data: "1" }], `cut at ${cut}`);
  }
});

test("columns stay within 15 minutes and a number of points, and keep their order", () => {
  const columns = new Columns();
  for (let at = 0; at < 5000; at += 1) columns.add(at * 1000, { a: at, ...(at > 4990 ? { b: 1 } : {}) });
  assert.ok(columns.times.length <= POINTS_MAX);
  assert.ok(columns.times.at(-1) - columns.times[0] <= HISTORY_MS / 1000);
  assert.equal(columns.column("a").length, columns.times.length);
  assert.equal(columns.column("b").filter((value) => value !== null).length, 9);
  columns.add(1000, { a: 1 });
  assert.equal(columns.last("a"), 4999, "an older point is left out");
});

test("a series that is gone is forgotten once its points are", () => {
  const columns = new Columns();
  columns.add(0, { gone: 1 });
  columns.add(HISTORY_MS + 1000, { here: 1 });
  assert.deepEqual([...columns.values.keys()], ["here"]);
});

test("the first update is drawn, also when a node was measured in the interval that has not ended", () => {
  const history = new History();
  const series = ["in_records", "cpu", "memory_bytes"];
  history.load({ series, cluster: [[5000, [2, 0.5, 9], []]], nodes: { 1: [[4000, [1, 0.5, 9]], [5500, [1, 0.9, 9]]], 2: [[4900, [1, 0.7, 9]]] } });
  history.add({ time_ms: 6000, series, sample: [3, 1, 1], lags: [], nodes: [{ node: 1, values: [1, 0.1, 8] }, { node: 2, values: [2, 0.2, 8] }] });
  assert.deepEqual(history.memory.column("node 1"), [9, 8]);
  assert.deepEqual(rounded(history.cpu.column("node 1")), [0.5, 0.42]);
  assert.deepEqual(rounded(history.cpu.column("node 2")), [0.7, 0.6]);
});

test("the history of the node comes before the updates", () => {
  const history = new History();
  const series = ["in_records", "cpu", "memory_bytes"];
  history.load({ series, cluster: [[5000, [1, 2, 3], [["c", "t", 7]]], [10_000, [2, 2, 3], []]], nodes: { 1: [[4000, [1, 0.5, 9]]], 2: [[4900, [1, 0.7, 9]]] } });
  history.add({ time_ms: 11_000, series, sample: [5, 1, 1], lags: [["c", "t", 9]], nodes: [{ node: 1, values: [1, 0.1, 8] }, { node: 2 }] });
  assert.deepEqual(history.cluster.column("in_records"), [1, 2, 2.6]);
  assert.deepEqual(history.lags.column("c · t"), [7, null, 9]);
  assert.deepEqual(history.cpu.column("node 2"), [0.7, null]);
});

test("updates are averaged over the steps of the history: a page that is opened sees no spike", () => {
  const history = new History();
  const series = ["in_records", "elections", "under_replicated"];
  const update = (timeMs, sample) => history.add({ time_ms: timeMs, series, sample, lags: [], nodes: [] });
  history.load({ series, cluster: [[5000, [100, 0, 0], []], [10_000, [100, 2, 0], []]], nodes: {} });
  // 500 records arrive in a batch every five seconds; the first update cannot know a rate, and the history is old.
  const shown = [];
  for (let at = 0; at < 20; at += 1) {
    update(17_000 + at * 1000, [at === 0 ? null : at % 5 === 4 ? 500 : 0, at === 2 || at === 3 ? 1 : 0, at === 19 ? 3 : 0]);
    shown.push(history.cluster.last("in_records"));
  }
  assert.ok(Math.max(...shown) <= 200, `no spike: ${shown}`);
  assert.deepEqual(shown.slice(5), Array(15).fill(100));
  assert.deepEqual(history.cluster.times, [5, 10, 20, 25, 30, 35, 36], "a point each step, and one of now");
  assert.deepEqual(history.cluster.column("elections"), [0, 2, 2, 0, 0, 0, 0], "each is counted once");
  assert.equal(history.cluster.last("under_replicated"), 3, "what is counted now is not averaged");
});

test("a value that is gone is no longer shown after a step", () => {
  const steps = new Steps(new Columns(), () => true);
  steps.add(1000, { a: 4 });
  for (let at = 2; at < 6; at += 1) steps.add(at * 1000, { a: null });
  assert.equal(steps.columns.last("a"), 4);
  steps.add(6000, { a: null });
  assert.equal(steps.columns.last("a"), null);
});

test("only visible rows are drawn, however many there are", () => {
  assert.deepEqual(visibleRows({ scrollTop: 0, height: 340, count: 1_000_000 }), { first: 0, end: 20 });
  const middle = visibleRows({ scrollTop: 3_400_000, height: 340, count: 1_000_000 });
  assert.ok(middle.end - middle.first <= 30 && middle.first > 99_000);
  assert.deepEqual(visibleRows({ scrollTop: 1e9, height: 340, count: 5 }), { first: 5, end: 5 });
});

test("a long list is loaded more rarely, but not forgotten", () => {
  assert.equal(refreshMs(0), refreshMs(1000));
  assert.ok(refreshMs(10_000) > 3 * refreshMs(1000));
  assert.equal(refreshMs(1_000_000), refreshMs(100_000));
});

test("rows are sorted by a column, those without a value last", () => {
  const column = { title: "", cell: () => "", sort: (row) => row.size };
  const rows = [{ size: 2 }, { size: null }, { size: 10 }];
  assert.deepEqual(sortRows(rows, column, false).map((row) => row.size), [2, 10, null]);
  assert.deepEqual(sortRows(rows, column, true).map((row) => row.size), [10, 2, null]);
  assert.equal(sortRows(rows, undefined, true), rows);
});

test("a look at records asks for what the form says, and says what is missing", () => {
  const form = { partition: "", start: "latest", at: "", key: "", search: "", max: "" };
  assert.deepEqual(toQuery(form), { partition_id: "", key: "", search: "", max: 100, from: "latest" });
  assert.equal(toQuery({ ...form, start: "offset", at: "7", partition: "1" }).offset, "7");
  assert.equal(toQuery({ ...form, start: "time", at: "2026-01-01T00:00:00Z" }).time_ms, Date.UTC(2026, 0, 1));
  assert.throws(() => toQuery({ ...form, start: "offset", at: "7" }), /partition/);
  assert.throws(() => toQuery({ ...form, start: "time", at: "later" }), /not a time/);
});

test("no record is kept twice, and the oldest make room", () => {
  const record = (offset) => ({ partition_id: 0, offset, timestamp: 0 });
  const known = keep([], [record(0), record(1)], 3);
  assert.equal(keep(known, [record(1)], 3), known, "nothing new: nothing is drawn again");
  assert.deepEqual(keep(known, [record(1), record(2), record(3)], 3).map((one) => one.offset), [1, 2, 3]);
});

test("every partition is read on from its own position, and one that failed begins with the newest", () => {
  const form = { key: "k", search: "", max: "1000" };
  assert.deepEqual(toNextQuery(form, 2, 7), { partition_id: 2, key: "k", search: "", max: "1000", offset: 7 });
  assert.deepEqual(toNextQuery(form, 2, undefined), { partition_id: 2, key: "k", search: "", max: "1000", from: "latest" });
  const ranges = [0, 1].map((at) => ({ partition_id: at, next_offset: 1, end_offset: 1 }));
  const more = { partition_id: 1, next_offset: 5, end_offset: 6 };
  assert.deepEqual(mergeRanges(ranges, [more]), [ranges[0], more]);
});

test("JSON is recognized, and text that looks like it is text", () => {
  assert.deepEqual(parseJson('{"a":1}'), { value: { a: 1 }, rounded: "" });
  assert.equal(parseJson("{not json}"), null);
  assert.equal(parseJson("plain"), null);
  assert.equal(parseJson(null), null);
});

test("a number that JavaScript rounds is kept as it is written, or named where a browser cannot do that", () => {
  assert.deepEqual(keepNumber("id", 12345678901234567000, { source: "12345678901234567890" }), new WrittenNumber("12345678901234567890"));
  assert.deepEqual(keepNumber("price", 1, { source: "1.0" }), new WrittenNumber("1.0"));
  assert.equal(keepNumber("id", 7, { source: "7" }), 7);
  assert.equal(keepNumber("id", "7", {}), "7");
  assert.equal(keepNumber("id", 7), 7);
  const roundedIn = (text) => parseJson(text, false).rounded;
  assert.equal(roundedIn('{"id": 12345678901234567890}'), "12345678901234567890");
  assert.equal(roundedIn('["1e999", -9007199254740993]'), "-9007199254740993");
  assert.equal(roundedIn("[1e999]"), "1e999");
  assert.equal(roundedIn("0.12345678901234567890"), "0.12345678901234567890");
  const exact = '{"12345678901234567890": "\\"12345678901234567890", "a": [9007199254740992, 1.0, -0.0, 0, 1E3, 0.1, 100000000000000000000, 5e-324]}';
  assert.equal(roundedIn(exact), "");
});

test("a partition's replicas lead, are in sync, catch up, or are not known", () => {
  const partition = { leader: 1, replicas: [1, 2, 3], in_sync_replicas: [1, 2] };
  assert.deepEqual([1, 2, 3, 4].map((node) => placement(partition, node)), ["leader", "in sync", "catching up", ""]);
  assert.equal(placement({ ...partition, leader: null, in_sync_replicas: null }, 2), "unknown");
  assert.equal(skew([10, 10, 10]), 1);
  assert.equal(skew([30, 0, 0]), 3);
  assert.equal(skew([0, 0]), 1);
});
