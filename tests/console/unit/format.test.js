import assert from "node:assert/strict";
import test from "node:test";

import * as format from "../../../src/quiver/gateway/console/static/format.js";

test("bytes and counts are shortened, and what is not known is a dash", () => {
  assert.equal(format.bytes(0), "0 B");
  assert.equal(format.bytes(1536), "1.50 KiB");
  assert.equal(format.bytes(73_434_230_784), "68.4 GiB");
  assert.equal(format.bytes(null), "–");
  assert.equal(format.count(1234567), "1,234,567");
  assert.equal(format.count(1234567, true), "1.2M");
  assert.equal(format.count(9999, true), "9,999");
  assert.equal(format.count(undefined), "–");
});

test("durations have their two largest units", () => {
  assert.equal(format.duration(999), "0 s");
  assert.equal(format.duration(61_000), "1 min 1 s");
  assert.equal(format.duration(86_400_000 * 7), "7 d");
  assert.equal(format.milliseconds(0.25), "0.3 ms");
  assert.equal(format.milliseconds(1500), "1.5 s");
});

test("retention says what any of its limits says", () => {
  assert.equal(format.retention({}), "forever");
  assert.equal(format.retention({ ms: 3_600_000, bytes: 1024, until_consumed: true }), "1 h, 1.00 KiB, until consumed");
});

test("durations and sizes are read back, and nonsense is refused with the way to write it", () => {
  assert.equal(format.parseDuration("7d"), 604_800_000);
  assert.equal(format.parseDuration(" 1.5h "), 5_400_000);
  assert.equal(format.parseDuration(""), null);
  assert.throws(() => format.parseDuration("soon"), /7d, 12h/);
  assert.equal(format.parseBytes("10GiB"), 10 * 2 ** 30);
  assert.equal(format.parseBytes("512"), 512);
  assert.throws(() => format.parseBytes("many"), /10GiB/);
});

test("headers are lines of name and value", () => {
  assert.deepEqual(format.parseHeaders("trace: a:b\n\n user : x "), { trace: "a:b", user: "x" });
  assert.throws(() => format.parseHeaders("nothing"), /name: value/);
});

test("a dump shows offset, bytes and text, and ends at its bound", () => {
  const lines = format.hexDump(new TextEncoder().encode("Hello, world\u0000 and more")).split("\n");
  assert.equal(lines[0], "00000000  48 65 6c 6c 6f 2c 20 77  6f 72 6c 64 00 20 61 6e  Hello, world. an");
  assert.match(lines[1], /^00000010 {2}64 20/);
  assert.match(format.hexDump(new Uint8Array(100), 2), /… 68 more bytes$/);
});

test("bytes come from text or from base64", () => {
  assert.deepEqual([...format.toBytes("é", undefined)], [0xc3, 0xa9]);
  assert.deepEqual([...format.toBytes(null, "AP8=")], [0, 255]);
});

test("what a replica has seen is said in words", () => {
  assert.equal(format.explainEvent({ kind: "leader", leader: 1 }), "becomes the leader");
  assert.equal(format.explainEvent({ kind: "follower", leader: 2 }), "follows node 2");
  assert.equal(format.explainEvent({ kind: "follower" }), "knows no leader");
  assert.equal(format.explainEvent({ kind: "pre_candidate", leader: null }), "asks for pre-votes");
  assert.equal(format.explainEvent({ kind: "transfer", leader: 3 }), "begins to transfer its leadership to node 3");
  assert.equal(format.explainEvent({ kind: "members", members: [1, 2], learners: [4] }), "has the members 1, 2 and the learners 4");
});
