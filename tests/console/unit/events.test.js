import assert from "node:assert/strict";
import test from "node:test";

import { EVENTS_MAX, findGap, mergeEvents } from "../../../src/quiver/gateway/console/static/events.js";

const range = (first, end) => Array.from({ length: end - first }, (_, at) => ({ id: first + at, time_ms: 0, kind: "topic", text: `event ${first + at}` }));
const known = (first, end) => range(first, end).reverse();
const ids = (events) => events.map((event) => event.id);

test("events are asked for if some happened between those that are known and those of an update", () => {
  assert.equal(findGap(known(1, 11), range(31, 51)), 10);
  assert.equal(findGap(known(1, 11), range(12, 13)), 10);
  assert.equal(findGap([], range(2, 4)), 0);
});

test("no events are asked for if none is missing", () => {
  assert.equal(findGap(known(1, 11), range(11, 31)), null);
  assert.equal(findGap(known(1, 11), range(1, 11)), null);
  assert.equal(findGap([], range(1, 3)), null);
  assert.equal(findGap(known(1, 11), []), null);
});

test("events are kept once and in order, the newest of them", () => {
  assert.deepEqual(ids(mergeEvents(known(1, 4), range(2, 7))), [6, 5, 4, 3, 2, 1]);
  const before = known(1, 4);
  assert.equal(mergeEvents(before, range(1, 4)), before, "nothing new: nothing is drawn again");
  const all = mergeEvents(known(1, 400), range(400, 601));
  assert.deepEqual([all.length, all[0].id, all.at(-1).id], [EVENTS_MAX, 600, 101]);
});
