import assert from "node:assert/strict";
import test from "node:test";

import { deadLetterTopics, requeueAll, toProduced } from "../../../src/quiver/gateway/console/static/dead-letters.js";

const letter = (offset, more = {}) => ({
  receipt: `r${offset}`,
  partition_id: 0,
  offset,
  message: `m${offset}`,
  headers: { "quiver-dead-topic": "jobs", "quiver-dead-partition": "2", "quiver-dead-reason": "x", trace: "t" },
  ...more,
});

/** An API that remembers its calls. */
function api(batches, refuse = () => false) {
  const calls = [];
  const post = async (path, body) => {
    calls.push([path, body]);
    if (refuse(path, body)) throw new Error("refused");
    if (path === "/queue/receive") return batches.length ? { jobs: batches.shift() } : null;
    return path === "/producer/register" ? { producer_id: 9 } : {};
  };
  return { post, calls, of: (path) => calls.filter(([called]) => called === path).map(([, body]) => body) };
}

test("a dead letter goes to where it comes from, without the marks of one", () => {
  assert.deepEqual(toProduced(letter(1, { key: "k" })), { topic: "jobs", partition_id: 2, message: "m1", key: "k", headers: { trace: "t" } });
  assert.deepEqual(toProduced({ ...letter(1), message: undefined, message_b64: "AP8=" }).message_b64, "AP8=");
  assert.throws(() => toProduced({ ...letter(1), headers: {} }), /does not say/);
});

test("all are produced before they are acknowledged, by one producer", async () => {
  const fake = api([[letter(1), letter(2)], [letter(3)]]);
  const counts = [];
  assert.equal(await requeueAll(fake, "jobs.workers.dead", "workers", (count) => counts.push(count)), 3);
  assert.deepEqual(counts, [2, 3]);
  assert.equal(fake.of("/producer/register").length, 1);
  assert.deepEqual(fake.of("/queue/ack").map((body) => body.receipts), [["r1", "r2"], ["r3"]]);
  assert.equal(fake.calls[0][1].group, "workers.dead");
  const order = fake.calls.map(([path]) => path);
  assert.ok(order.indexOf("/queue/ack") > order.indexOf("/producer/produce"));
});

test("those that could not be produced come back, and the others are settled", async () => {
  const fake = api([[letter(1), letter(2), letter(3)]], (path, body) => path === "/producer/produce" && body.message === "m2");
  await assert.rejects(requeueAll(fake, "d", "g", () => {}), /refused/);
  assert.deepEqual(fake.of("/queue/ack").map((body) => body.receipts), [["r1"]]);
  assert.deepEqual(fake.of("/queue/nack").map((body) => [body.receipts, body.delay_ms]), [[["r2", "r3"], 0]]);
});

test("topics that share one for dead letters are shown together", () => {
  assert.deepEqual(deadLetterTopics({ jobs: "graves", chores: "graves", mail: "mail.post.dead" }), [["graves", ["jobs", "chores"]], ["mail.post.dead", ["mail"]]]);
});

test("dead letters of another queue in the same topic are passed over", async () => {
  const of = (offset, group) => letter(offset, { headers: { ...letter(offset).headers, "quiver-dead-group": group } });
  const called = api([[of(1, "jobs"), of(2, "others"), of(3, "jobs")]]);
  assert.equal(await requeueAll(called, "graves", "jobs", () => {}), 2);
  assert.deepEqual(called.of("/producer/produce").map((body) => body.message), ["m1", "m3"]);
  assert.deepEqual(called.of("/queue/ack").map((body) => body.receipts), [["r2", "r1", "r3"]]);
  assert.deepEqual(called.of("/queue/nack"), []);
});
