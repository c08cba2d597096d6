import assert from "node:assert/strict";
import test from "node:test";

import { parseRoute } from "../../../src/quiver/gateway/console/static/route.js";

test("an address is cut into its parts, and names are decoded", () => {
  assert.deepEqual(parseRoute(""), [""]);
  assert.deepEqual(parseRoute("#/topics/a%2Fb/records"), ["topics", "a/b", "records"]);
});

test("a part that is not well-formed is taken as it stands", () => {
  assert.deepEqual(parseRoute("#/topics/%E0%A4"), ["topics", "%E0%A4"]);
});
