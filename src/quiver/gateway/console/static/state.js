/** What all pages share: the API, the newest update of the stream, and where the page is connected. */

import { Api } from "./api.js";
import { findGap, mergeEvents } from "./events.js";
import { History } from "./history.js";
import { follow } from "./live.js";
import { countFrom } from "./moves.js";
import { Store } from "./store.js";

/**
 * @typedef {object} ConsoleNode
 * @property {number} node
 * @property {string} state
 * @property {string[]} roles
 * @property {string} http_address
 * @property {string} wire_address
 * @property {string} [rack]
 * @property {boolean} [is_alive]
 * @property {boolean} [is_primary]
 * @property {boolean} [is_ready]
 * @property {string} [version]
 * @property {number} [uptime_ms]
 * @property {number} [leads]
 * @property {number} [replicas]
 * @property {number} [log_bytes]
 * @property {string} [problem]
 * @property {string} [security_mode]
 * @property {number} [rebuild_replicas]
 * @property {number} [rebuild_bytes]
 * @property {Array<number | null>} [values]
 */
/**
 * @typedef {object} Update
 * @property {number} time_ms
 * @property {number} served_by
 * @property {string} cluster_id
 * @property {number | null} primary
 * @property {number} feature_level
 * @property {string} security_mode
 * @property {{ level: "ok" | "warning" | "critical", sentence: string, reasons: Array<[string, string]> }} health
 * @property {string[]} series
 * @property {Array<number | null>} sample
 * @property {Array<[string, string, number]>} lags
 * @property {ConsoleNode[]} nodes
 * @property {number} topics
 * @property {number} partitions
 * @property {number} producers
 * @property {number} consumers
 * @property {number} holds
 * @property {boolean} is_rebalancing
 * @property {Array<{ topic: string, partition: number, source: number | null, target: number, state: string, begun_ms: number }>} moves
 * @property {number} moves_total
 * @property {number} moves_ended
 * @property {Event_[]} events
 */
/** @typedef {import("./events.js").ConsoleEvent} Event_ */

export const api = new Api({ origin: location.origin, storage: window.sessionStorage });
export const history = new History();

/** @type {Store<Update | null>} */
export const update = new Store(/** @type {Update | null} */ (null));
/** @type {Store<import("./moves.js").MovesStart | null>} */
export const movesStart = new Store(/** @type {import("./moves.js").MovesStart | null} */ (null));
/** @type {Store<Event_[]>} newest first */
export const events = new Store(/** @type {Event_[]} */ ([]));
/** @type {Store<import("./api.js").Place>} */
export const place = new Store(/** @type {import("./api.js").Place} */ ({ address: api.address, state: "connected", note: "" }));
/** @type {Store<{ state: "unknown" | "open" | "known" | "needed", principal: string, error: string }>} */
export const session = new Store(/** @type {any} */ ({ state: "unknown", principal: "", error: "" }));
/** @type {Store<Error | null>} why there is no stream */
export const streamError = new Store(/** @type {Error | null} */ (null));

api.onPlace = (now) => place.set(now);
api.onUnauthenticated = () => {
  if (session.value.state !== "needed") session.set({ state: "needed", principal: "", error: api.token ? "this token is not valid (any more)" : "" });
};

/** @type {AbortController | null} */
let stream = null;
/** The node whose events are shown. */
let streamAddress = "";
let isAskingEvents = false;

/** Find out who the caller is, and start to follow the cluster. */
export async function begin() {
  try {
    const found = await api.get("/console/session");
    api.learn(found.nodes);
    session.set({ state: found.principal ? "known" : "open", principal: found.principal, error: "" });
  } catch (error) {
    if (session.value.state !== "needed") {
      streamError.set(/** @type {Error} */ (error));
      setTimeout(begin, 2000);
    }
    return;
  }
  stream?.abort();
  stream = new AbortController();
  follow(api, handleEvent, (error) => streamError.value !== error && streamError.set(error), stream.signal);
}

/** @param {string} token */
export async function login(token) {
  api.setToken(token);
  session.set({ state: "unknown", principal: "", error: "" });
  await begin();
}

export function logout() {
  stream?.abort();
  api.setToken("");
  update.set(null);
  session.set({ state: "needed", principal: "", error: "" });
}

/**
 * @param {string} name
 * @param {any} value
 */
function handleEvent(name, value) {
  if (name === "history") {
    history.load(value);
    streamAddress = api.address;
    events.set([...value.events].reverse());
  } else if (name === "update") {
    history.add(value);
    api.learn(value.nodes.map((/** @type {ConsoleNode} */ node) => node.http_address).filter(Boolean));
    takeEvents(value.events);
    movesStart.set(countFrom(movesStart.value, value));
    update.set(value);
  }
}

/**
 * Take the newest events of an update; those in between are asked for first. If that fails, the next update finds the
 * same gap. Events of another node have other numbers.
 *
 * @param {Event_[]} newest
 */
async function takeEvents(newest) {
  const last = findGap(events.value, newest);
  const address = streamAddress;
  if (last === null || api.address !== address) {
    events.set(mergeEvents(events.value, newest));
  } else if (!isAskingEvents) {
    isAskingEvents = true;
    try {
      const { events: missing } = await api.get("/cluster/events", { after: last });
      if (api.address === address && streamAddress === address) events.set(mergeEvents(events.value, missing));
    } catch {
      // The next update tries it again.
    } finally {
      isAskingEvents = false;
    }
  }
}
