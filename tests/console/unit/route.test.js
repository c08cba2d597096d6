import assert from "node:assert/strict";
import test from "node:test";

import { consumerLink, parseRoute } from "../../../src/quiver/gateway/console/static/route.js";

test("an address is cut into its parts, and names are decoded", () => {
  assert.deepEqual(parseRoute(""), [""]);
  assert.deepEqual(parseRoute("#/topics/a%2Fb/records"), ["topics", "a/b", "records"]);
});

test("a part that is not well-formed is taken as it stands", () => {
  assert.deepEqual(parseRoute("#/topics/%E0%A4"), ["topics", "%E0%A4"]);
});

test("the cursors of a group lead to the group, those of a consumer to the consumer", () => {
  assert.equal(consumerLink({ id: 7, name: "a/b", group_kind: "queue" }), "#/consumers/group/a%2Fb");
  assert.equal(consumerLink({ id: 7, name: "a/b", group_kind: null }), "#/consumers/consumer/7");
  assert.equal(consumerLink({ id: 7 }), "#/consumers/consumer/7");
});
