import assert from "node:assert/strict";
import test from "node:test";

import { countFrom, tellMoves } from "../../../src/quiver/gateway/console/static/moves.js";

const AT = new Date(2026, 0, 1, 14, 3).getTime();
const moving = (more = {}) => ({ time_ms: AT, is_rebalancing: false, moves_total: 0, moves_ended: 0, nodes: [], ...more });

test("moves are counted from when there was nothing to move", () => {
  let start = countFrom(null, moving({ moves_ended: 7 }));
  start = countFrom(start, moving({ moves_ended: 7, time_ms: AT + 1000 }));
  assert.deepEqual(start, { ended: 7, timeMs: AT + 1000 });
  for (const more of [{ moves_total: 8 }, { is_rebalancing: true }, { nodes: [{ node: 1, state: "draining" }] }]) {
    assert.equal(countFrom(start, moving({ moves_ended: 30, time_ms: AT + 60_000, ...more })), start);
  }
  assert.equal(countFrom(start, moving({ moves_ended: 30, time_ms: AT + 60_000 })).ended, 30);
});

test("a page that opens meanwhile, or sees another cluster, counts from then on", () => {
  assert.deepEqual(countFrom(null, moving({ moves_ended: 30, moves_total: 8 })), { ended: 30, timeMs: AT });
  assert.equal(countFrom({ ended: 50, timeMs: AT }, moving({ moves_ended: 3, moves_total: 8 })).ended, 3);
});

test("what is in progress is told without a total that nobody knows", () => {
  const start = { ended: 10, timeMs: AT };
  assert.deepEqual(tellMoves(start, moving({ moves_ended: 10 })), []);
  assert.deepEqual(tellMoves(start, moving({ moves_total: 8, moves_ended: 1210 })), ["8 moves in progress, 1,200 ended since 14:03."]);
  const nodes = [
    { node: 1, state: "alive" },
    { node: 2, state: "draining", replicas: 1 },
    { node: 3, state: "draining" },
    { node: 4, state: "alive", rebuild_replicas: 2, rebuild_bytes: 1536 },
    { node: 5, state: "alive", rebuild_replicas: 1, rebuild_bytes: 0 },
  ];
  assert.deepEqual(tellMoves(start, moving({ moves_ended: 10, nodes })), [
    "Node 2 is being drained: 1 replica left on it.",
    "Node 3 is being drained: an unknown number of replicas left on it.",
    "Node 4 still gets about 1.50 KiB for 2 replicas.",
  ]);
});
