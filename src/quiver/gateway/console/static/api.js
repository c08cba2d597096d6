/**
 * Calls of the HTTP API, on the node that served the page or, once that is gone, on another one of the cluster.
 *
 * The token is kept in this tab's session storage alone and sent as a header, never as a cookie: pages of other sites
 * cannot use it. A call that reads is repeated on another node; one that changes something is not, since it may have
 * been done.
 */

const TOKEN_KEY = "quiver-token";
/** How long a node may take to prove that it lives, when another one is looked for. */
const PROBE_MS = 2000;
/** How often, and how many times, the page looks whether something is gone whose deletion has an unknown outcome. */
const LOOK_MS = 1000;
const LOOKS_MAX = 15;
/** How long a page that changed something takes no answers that were made for others: none is kept for so long. */
export const FRESH_MS = 15_000;

/** An answer that is a failure, or none at all. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{ status?: number, code?: string, outcome?: string }} [facts]
   */
  constructor(message, facts = {}) {
    super(message);
    this.status = facts.status ?? 0;
    this.code = facts.code ?? "unreachable";
    this.outcome = facts.outcome ?? "";
  }
}

/**
 * @typedef {object} Place
 * @property {string} address host:port of the node that is asked
 * @property {"connected" | "searching" | "lost"} state
 * @property {string} note what happened, for people
 */

export class Api {
  /**
   * @param {{ origin: string, storage?: Storage | null, fetch?: typeof fetch, lookMs?: number, now?: () => number }} options `now`: milliseconds from any start
   */
  constructor({ origin, storage = null, fetch: fetcher = (input, init) => fetch(input, init), lookMs = LOOK_MS, now = () => Date.now() }) {
    const url = new URL(origin);
    this.scheme = url.protocol;
    this.home = url.host;
    this.address = url.host;
    /** @type {string[]} */
    this.nodes = [url.host];
    this.storage = storage;
    this.fetch = fetcher;
    this.lookMs = lookMs;
    this.now = now;
    this.changedMs = -Infinity;
    this.token = storage?.getItem(TOKEN_KEY) ?? "";
    /** @type {(place: Place) => void} */
    this.onPlace = () => {};
    /** @type {() => void} */
    this.onUnauthenticated = () => {};
    /** @type {Promise<boolean> | null} */
    this.searching = null;
  }

  /** @param {string} token */
  setToken(token) {
    this.token = token;
    if (token) this.storage?.setItem(TOKEN_KEY, token);
    else this.storage?.removeItem(TOKEN_KEY);
  }

  /**
   * Remember where the nodes of the cluster are.
   *
   * @param {string[]} addresses
   */
  learn(addresses) {
    if (addresses.length) this.nodes = [...new Set([this.home, ...addresses])];
  }

  /**
   * @param {string} path
   * @param {Record<string, unknown>} [parameters]
   */
  get(path, parameters = {}) {
    return this.call("GET", withQuery(path, parameters));
  }

  /**
   * Return what a page asks for again and again: an answer that the node made for another console is as good. Only after
   * a change by this page it is not, which might be shown as undone.
   *
   * @param {string} path
   * @param {Record<string, unknown>} [parameters]
   */
  poll(path, parameters = {}) {
    const isShared = this.now() - this.changedMs >= FRESH_MS;
    return this.get(path, isShared ? { ...parameters, shared: true } : parameters);
  }

  /**
   * @param {string} path
   * @param {Record<string, unknown>} [body]
   */
  post(path, body = {}) {
    return this.call("POST", path, body);
  }

  /** @param {string} path */
  remove(path) {
    return this.call("DELETE", path);
  }

  /**
   * Delete what a GET of the same path describes. A deletion of unknown outcome is not repeated: it might hit something
   * new of the same name. The page looks for a while whether it is gone.
   *
   * @param {string} path
   */
  async removeResource(path) {
    try {
      await this.remove(path);
    } catch (error) {
      if (!(error instanceof ApiError) || error.outcome !== "unknown") throw error;
      for (let looks = 0; !(await this.isGone(path)); looks += 1) {
        if (looks >= LOOKS_MAX) throw error;
        await new Promise((resolve) => setTimeout(resolve, this.lookMs));
      }
    }
  }

  /** @param {string} path */
  async isGone(path) {
    try {
      await this.get(path);
      return false;
    } catch (error) {
      return error instanceof ApiError && error.status === 404;
    }
  }

  /**
   * Return the decoded answer of a call.
   *
   * @param {string} method
   * @param {string} path
   * @param {Record<string, unknown>} [body]
   * @returns {Promise<any>}
   */
  async call(method, path, body) {
    const response = await this.send(method, path, body).finally(() => {
      if (method !== "GET") this.changedMs = this.now();
    });
    if (response.status === 204) return null;
    return response.json();
  }

  /**
   * Return the response of a call; one that is not a success is thrown.
   *
   * @param {string} method
   * @param {string} path
   * @param {Record<string, unknown>} [body]
   * @param {AbortSignal} [signal]
   * @returns {Promise<Response>}
   */
  async send(method, path, body, signal) {
    for (let attempt = 0; ; attempt += 1) {
      const address = this.address;
      let response;
      try {
        response = await this.fetch(`${this.scheme}//${address}${path}`, {
          method,
          headers: { ...(this.token ? { Authorization: `Bearer ${this.token}` } : {}) },
          body: body === undefined ? undefined : JSON.stringify(body),
          credentials: "omit",
          cache: "no-store",
          signal,
        });
      } catch (error) {
        if (signal?.aborted) throw error;
        const isFound = await this.failover(address);
        if (method === "GET" && isFound && attempt < this.nodes.length) continue;
        throw new ApiError(
          method === "GET" ? "no node of the cluster answers" : `unknown: ${address} went away during the call; look whether it was done`,
          { outcome: method === "GET" ? "not_done" : "unknown" },
        );
      }
      if (response.ok) return response;
      throw await this.explain(response);
    }
  }

  /** @param {Response} response */
  async explain(response) {
    let answer = { message: `the node answered with status ${response.status}`, code: "unexpected", outcome: "" };
    try {
      answer = { ...answer, ...(await response.json()) };
    } catch {
      // not JSON: a proxy in between
    }
    if (response.status === 401) this.onUnauthenticated();
    return new ApiError(answer.message, { status: response.status, code: answer.code, outcome: answer.outcome });
  }

  /**
   * Find a node that answers instead of one that does not; return whether there is one.
   *
   * @param {string} failed
   * @returns {Promise<boolean>}
   */
  failover(failed) {
    if (this.address !== failed) return Promise.resolve(true); // another call found one meanwhile
    this.searching ??= this.search(failed).finally(() => {
      this.searching = null;
    });
    return this.searching;
  }

  /** @param {string} failed */
  async search(failed) {
    this.onPlace({ address: failed, state: "searching", note: `${failed} does not answer; looking for another node` });
    const others = this.nodes.filter((address) => address !== failed);
    for (const address of [...others, failed]) {
      if (await this.probe(address)) {
        this.address = address;
        const note = address === failed ? "" : `${failed} does not answer; connected to ${address}`;
        this.onPlace({ address, state: "connected", note });
        return true;
      }
    }
    this.onPlace({ address: failed, state: "lost", note: "no node of the cluster answers; trying again" });
    return false;
  }

  /** @param {string} address */
  async probe(address) {
    try {
      const signal = AbortSignal.timeout(PROBE_MS);
      const response = await this.fetch(`${this.scheme}//${address}/readyz`, { credentials: "omit", cache: "no-store", signal });
      return response.ok;
    } catch {
      return false;
    }
  }
}

/**
 * Return a path with parameters; those that are null, undefined or empty are left out.
 *
 * @param {string} path
 * @param {Record<string, unknown>} parameters
 */
export function withQuery(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}
