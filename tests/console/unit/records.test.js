import assert from "node:assert/strict";
import test from "node:test";

import { ApiError } from "../../../src/quiver/gateway/console/static/api.js";
import { RecordReader } from "../../../src/quiver/gateway/console/static/browse.js";

const FORM = { partition: "", start: "earliest", at: "", key: "", search: "", max: "2" };

/** A topic whose answers come when they are let go; `ends` has the end of each partition. */
function topic(ends) {
  const asked = [];
  const answer = ({ partition_id: partition, offset = 0, max }) => {
    const numbers = partition === "" ? ends.map((_, at) => at) : [partition];
    const partitions = numbers.map((at) => ({ partition_id: at, next_offset: Math.min(ends[at], offset + Number(max)), end_offset: ends[at] }));
    const records = partitions.flatMap((range) => Array.from({ length: range.next_offset - offset }, (_, at) => ({ partition_id: range.partition_id, offset: offset + at })));
    return { records, partitions, scanned: records.length };
  };
  const held = [];
  const state = { isHeld: false, error: null };
  const ask = (query) => {
    asked.push(query);
    if (state.error) return Promise.reject(state.error);
    if (!state.isHeld) return Promise.resolve(answer(query));
    return new Promise((resolve) => held.push(() => resolve(answer(query))));
  };
  const release = () => held.shift()();
  return { ask, asked, state, release };
}

const shown = (reader) => reader.records.map((one) => `${one.partition_id}/${one.offset}`);

test("partitions are read on until their end, or so many times", async () => {
  const { ask, asked } = topic([3, 9]);
  const reader = new RecordReader(ask);
  assert.equal(await reader.look(FORM), 4);
  assert.equal(reader.behind, 1 + 7);
  await reader.readOn();
  assert.equal(reader.behind, 5);
  asked.length = 0;
  await reader.readOn(2);
  assert.equal(reader.behind, 1);
  assert.deepEqual(asked.map((query) => [query.partition_id, query.offset]), [[0, 3], [1, 4], [1, 6]]);
  await reader.readOn(10);
  assert.equal(reader.behind, 0);
  assert.deepEqual(shown(reader).filter((one) => one.startsWith("1")), Array.from({ length: 9 }, (_, at) => `1/${at}`));
});

test("what was asked for before a look does not move the positions of the look", async () => {
  for (const order of [["older", "look"], ["look", "older"]]) {
    const { ask, state, release } = topic([9]);
    const reader = new RecordReader(ask);
    await reader.look(FORM);
    await reader.readOn();
    state.isHeld = true;
    // The page reads on while it follows; a look from the beginning starts before, or after, the answer is on its way.
    const calls = { look: null, older: null };
    for (const name of order) calls[name] = name === "look" ? reader.look(FORM) : reader.readOn(10);
    release();
    release();
    await calls.look;
    assert.equal(await calls.older, true);
    assert.deepEqual(shown(reader), ["0/0", "0/1"]);
    assert.equal(reader.positions.get(0), 2);
    state.isHeld = false;
    await reader.readOn();
    assert.deepEqual(shown(reader), ["0/0", "0/1", "0/2", "0/3"]);
  }
});

test("the later of two looks is shown, whichever is answered first", async () => {
  const { ask } = topic([9]);
  const held = [];
  const reader = new RecordReader((query) => new Promise((resolve) => held.push(async () => resolve(await ask(query)))));
  const looks = [reader.look(FORM), reader.look({ ...FORM, max: "5" })];
  await held[1]();
  await held[0]();
  assert.deepEqual(await Promise.all(looks), [null, 5]);
  assert.equal(reader.records.length, 5);
});

test("a look that fails leaves what was shown, and what it is read on with", async () => {
  const { ask, asked, state } = topic([9]);
  const reader = new RecordReader(ask);
  await reader.look({ ...FORM, key: "a" });
  state.error = new ApiError("no leader", { status: 503, code: "no_leader" });
  await assert.rejects(reader.look({ ...FORM, key: "b" }), /no leader/);
  state.error = null;
  await reader.readOn();
  assert.deepEqual([asked.at(-1).key, asked.at(-1).offset], ["a", 2]);
});

test("a partition that cannot be read says why; one that was trimmed goes on with the newest", async () => {
  const { ask, asked, state } = topic([9]);
  const reader = new RecordReader(ask);
  await reader.look(FORM);
  state.error = new ApiError("trimmed away", { status: 410, code: "trimmed" });
  await reader.readOn(10);
  assert.deepEqual([reader.ranges[0].error, reader.behind], ["trimmed away", 0]);
  state.error = null;
  await reader.readOn();
  assert.equal(asked.at(-1).from, "latest");
  state.error = new ApiError("no node answers");
  await assert.rejects(reader.readOn(), /no node/);
});
