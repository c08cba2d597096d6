import assert from "node:assert/strict";
import test from "node:test";

import { Api, ApiError, FRESH_MS, withQuery } from "../../../src/quiver/gateway/console/static/api.js";

/** A cluster whose nodes answer, or do not. */
function cluster({ dead = [], answers = {} } = {}) {
  const asked = [];
  const fetch = async (url, options = {}) => {
    const { host, pathname, search } = new URL(url);
    asked.push({ host, path: pathname + search, method: options.method ?? "GET", headers: options.headers ?? {}, body: options.body });
    if (dead.includes(host)) throw new TypeError("Failed to fetch");
    const [status, body] = answers[pathname] ?? [200, { status: "success" }];
    return new Response(JSON.stringify(body), { status });
  };
  return { fetch, asked, dead };
}

function storage() {
  const kept = new Map();
  return { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value), removeItem: (name) => kept.delete(name) };
}

test("parameters that are empty are left out", () => {
  assert.equal(withQuery("/x", { a: 1, b: "", c: null, d: undefined, e: "ä/b" }), "/x?a=1&e=%C3%A4%2Fb");
  assert.equal(withQuery("/x", {}), "/x");
});

test("the token is sent as a header and kept in the session alone", async () => {
  const kept = storage();
  const { fetch, asked } = cluster();
  const api = new Api({ origin: "http://one:1", storage: kept, fetch });
  api.setToken("secret");
  await api.get("/topics");
  assert.equal(asked[0].headers.Authorization, "Bearer secret");
  assert.equal(new Api({ origin: "http://one:1", storage: kept, fetch }).token, "secret");
  api.setToken("");
  assert.equal(new Api({ origin: "http://one:1", storage: kept, fetch }).token, "");
});

test("a read goes on with another node, which is told", async () => {
  const { fetch, asked } = cluster({ dead: ["one:1", "two:2"] });
  const api = new Api({ origin: "https://one:1", fetch });
  const places = [];
  api.onPlace = (place) => places.push(`${place.state} ${place.address}`);
  api.learn(["one:1", "two:2", "three:3"]);
  assert.deepEqual(await api.get("/topics"), { status: "success" });
  assert.equal(api.address, "three:3");
  assert.deepEqual(places, ["searching one:1", "connected three:3"]);
  assert.deepEqual(asked.at(-1), { host: "three:3", path: "/topics", method: "GET", headers: {}, body: undefined });
});

test("a change is not repeated: it may have been done", async () => {
  const { fetch, asked } = cluster({ dead: ["one:1"] });
  const api = new Api({ origin: "http://one:1", fetch });
  api.learn(["two:2"]);
  await assert.rejects(api.post("/topics", { topic_name: "x" }), (error) => error instanceof ApiError && error.outcome === "unknown");
  assert.equal(asked.filter((one) => one.method === "POST").length, 1);
  assert.equal(api.address, "two:2", "the next call goes to a node that answers");
});

test("what is repeated is shared with other consoles, except after a change, of whatever outcome", async () => {
  const { fetch, asked, dead } = cluster();
  let now = 0;
  const api = new Api({ origin: "http://one:1", fetch, now: () => now });
  const poll = async () => {
    await api.poll("/groups", { a: 1 });
    return asked.at(-1).path;
  };
  assert.equal(await poll(), "/groups?a=1&shared=true");
  await api.post("/groups/g/reset");
  now = FRESH_MS - 1;
  assert.equal(await poll(), "/groups?a=1");
  now = FRESH_MS;
  assert.equal(await poll(), "/groups?a=1&shared=true");
  api.learn(["two:2"]);
  dead.push("one:1");
  await assert.rejects(api.remove("/groups/g"));
  assert.equal(await poll(), "/groups?a=1");
  await api.get("/groups");
  assert.equal(asked.at(-1).path, "/groups");
});

test("whether something is gone is asked of the cluster itself", async () => {
  const { fetch, asked } = cluster();
  await new Api({ origin: "http://one:1", fetch }).isGone("/topics/x");
  assert.equal(asked[0].path, "/topics/x");
});

test("a deletion of unknown outcome is not repeated; it is done once the page finds nothing there", async () => {
  const answers = { "/topics/x": [504, { message: "may have been done", code: "timed_out", outcome: "unknown" }] };
  const { fetch: answer, asked } = cluster({ answers });
  const fetch = async (url, options) => {
    const response = await answer(url, options);
    const looks = asked.filter((one) => one.method === "GET").length;
    answers["/topics/x"] = looks < 2 ? [200, { status: "success" }] : [404, { message: "unknown topic", code: "unknown_topic" }];
    return response;
  };
  await new Api({ origin: "http://one:1", fetch, lookMs: 0 }).removeResource("/topics/x");
  assert.deepEqual(asked.map((one) => one.method), ["DELETE", "GET", "GET", "GET"]);
});

test("a deletion whose outcome stays unknown, or that was refused, is an error", async () => {
  for (const [outcome, looks] of [["unknown", 16], ["not_done", 0]]) {
    const { fetch: answer, asked } = cluster({ answers: { "/topics/x": [503, { message: "no primary", code: "timed_out", outcome }] } });
    const fetch = async (url, options) => (options.method === "DELETE" ? answer(url, options) : (await answer(url, options), new Response("{}")));
    const api = new Api({ origin: "http://one:1", fetch, lookMs: 0 });
    await assert.rejects(api.removeResource("/topics/x"), (error) => error instanceof ApiError && error.outcome === outcome);
    assert.deepEqual(asked.map((one) => one.method), ["DELETE", ...Array(looks).fill("GET")]);
  }
});

test("without any node the error says so, and the page tries again", async () => {
  const { fetch, dead } = cluster({ dead: ["one:1", "two:2"] });
  const api = new Api({ origin: "http://one:1", fetch });
  const states = [];
  api.onPlace = (place) => states.push(place.state);
  api.learn(["two:2"]);
  await assert.rejects(api.get("/topics"), /no node/);
  assert.equal(states.at(-1), "lost");
  dead.length = 0;
  await api.get("/topics");
});

test("one search serves all calls that fail at the same time", async () => {
  const { fetch, asked } = cluster({ dead: ["one:1"] });
  const api = new Api({ origin: "http://one:1", fetch });
  api.learn(["two:2"]);
  await Promise.all([api.get("/a"), api.get("/b"), api.get("/c")]);
  assert.equal(asked.filter((one) => one.path === "/readyz").length, 1);
});

test("a failure has the words of the node; 401 asks for a token", async () => {
  const failure = { status: "failure", code: "unauthenticated", message: "authenticate", outcome: "not_done" };
  const { fetch } = cluster({ answers: { "/topics": [401, failure] } });
  const api = new Api({ origin: "http://one:1", fetch });
  let asked = 0;
  api.onUnauthenticated = () => (asked += 1);
  await assert.rejects(api.get("/topics"), (error) => error.code === "unauthenticated" && error.status === 401 && error.message === "authenticate");
  assert.equal(asked, 1);
});
