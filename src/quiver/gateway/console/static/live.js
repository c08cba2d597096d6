/**
 * The stream of server-sent events: read with `fetch`, because an `EventSource` cannot send a token.
 *
 * When the stream ends, or nothing comes for a while, another node is looked for and the stream begins again there.
 */

import { ApiError } from "./api.js";

/** A node sends something at least every ten seconds; one that is silent for longer is gone. */
export const SILENCE_MS = 15_000;
const PAUSE_MS = 1000;

/** Cuts a stream of bytes into events. */
export class EventParser {
  constructor() {
    this.text = "";
    this.decoder = new TextDecoder();
  }

  /**
   * Return the events that are complete now.
   *
   * @param {Uint8Array} bytes
   * @returns {Array<{ name: string, data: string }>}
   */
  feed(bytes) {
    this.text += this.decoder.decode(bytes, { stream: true });
    const events = [];
    for (let end = this.text.indexOf("\n\n"); end >= 0; end = this.text.indexOf("\n\n")) {
      const lines = this.text.slice(0, end).split("\n");
      this.text = this.text.slice(end + 2);
      const field = (/** @type {string} */ name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2));
      const data = field("data");
      if (data.length) events.push({ name: field("event")[0] ?? "message", data: data.join("\n") });
    }
    return events;
  }
}

/**
 * Read the stream until `signal` is aborted.
 *
 * @param {import("./api.js").Api} api
 * @param {(name: string, value: any) => void} onEvent
 * @param {(error: Error | null) => void} onState null: it works
 * @param {AbortSignal} signal
 */
export async function follow(api, onEvent, onState, signal) {
  while (!signal.aborted) {
    const address = api.address;
    try {
      await readOnce(api, onEvent, onState, signal);
    } catch (error) {
      if (signal.aborted) return;
      onState(/** @type {Error} */ (error));
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) return;
      if (!(error instanceof ApiError)) await api.failover(address);
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

/**
 * @param {import("./api.js").Api} api
 * @param {(name: string, value: any) => void} onEvent
 * @param {(error: Error | null) => void} onState
 * @param {AbortSignal} signal
 */
async function readOnce(api, onEvent, onState, signal) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  try {
    const response = await api.send("GET", "/console/events", undefined, AbortSignal.any([signal, silence.signal]));
    const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
    const parser = new EventParser();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the stream ended");
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      for (const event of parser.feed(value)) {
        onState(null);
        onEvent(event.name, JSON.parse(event.data));
      }
    }
  } finally {
    clearTimeout(timer);
    silence.abort();
  }
}
