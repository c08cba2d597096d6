import assert from "node:assert/strict";
import test from "node:test";

import { LIMITS, SOON_MS, expiry, grantKey, grantText, grantsOf, insecureText, isTokenOf, limitTexts } from "../../../src/quiver/gateway/console/static/access.js";

const grant = (more = {}) => ({ subject: "user:ann", verb: "read", kind: "topic", name: "logs", is_prefix: false, ...more });

test("a grant is a sentence, in the words of the cluster", () => {
  assert.equal(grantText(grant()), "user:ann may read topic logs");
  assert.equal(grantText(grant({ is_prefix: true })), "user:ann may read topics logs*");
  assert.equal(grantText(grant({ is_prefix: true, name: "" })), "user:ann may read all topics");
  assert.equal(grantText(grant({ kind: "cluster", name: "", verb: "admin" })), "user:ann may admin the cluster");
});

test("a name and a prefix of the same text are two grants", () => {
  assert.notEqual(grantKey(grant()), grantKey(grant({ is_prefix: true })));
});

test("a user has its own grants, then those of its roles, and no others", () => {
  const all = [grant({ subject: "role:ops" }), grant(), grant({ subject: "user:anna" }), grant({ subject: "role:dev" })];
  assert.deepEqual(grantsOf(all, { user: "ann", roles: ["ops"] }).map((one) => one.subject), ["user:ann", "role:ops"]);
});

test("a token that ends soon, or has ended, is marked", () => {
  assert.equal(expiry(null, 1000).text, "never");
  assert.equal(expiry(1000, 1000).text, "expired");
  assert.equal(expiry(1000 + SOON_MS - 1, 1000).level, "warning");
  assert.equal(expiry(1000 + SOON_MS, 1000).level, "ok");
});

test("the token in use is known by its id alone", () => {
  const token = { token_id: "0011", user: "ann", created_ms: 0, expires_ms: null };
  assert.ok(isTokenOf(token, "qv_0011_secret"));
  assert.ok(!isTokenOf(token, "qv_00112_secret"));
  assert.ok(!isTokenOf(token, ""));
});

test("limits that are set are said, 0 as none", () => {
  assert.deepEqual(limitTexts({ bytes_in_per_second: 1 << 20, topics_max: 0, weight: null }), ["Bytes in per second: 1.00 MiB", "Topics owned: no limit"]);
  assert.equal(new Set(LIMITS.map((one) => one.name)).size, LIMITS.length);
});

test("nodes that gave up their protection are named, those in development mode are not", () => {
  const nodes = ["insecure", "development", "secure", undefined].map((mode, at) => ({ node: at + 1, security_mode: mode }));
  assert.equal(insecureText(nodes.slice(1)), "");
  assert.match(insecureText(nodes), /^Node 1 is insecure .* its ports may do everything/);
  assert.match(insecureText([1, 2, 3].map((node) => ({ node, security_mode: "insecure" }))), /^Nodes 1, 2 and 3 are insecure/);
});
