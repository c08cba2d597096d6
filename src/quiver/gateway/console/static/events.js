/**
 * Events of the node that serves the page: which of them the page lacks, and which it keeps. Pure.
 *
 * A node numbers its events from 1. An update has the newest few; more may have happened between two updates.
 */

/** Events that a page keeps, as many as a node does. */
export const EVENTS_MAX = 500;

/** @typedef {{ id: number, time_ms: number, kind: string, text: string, level?: string }} ConsoleEvent */

/**
 * Return the last event that is known if some between it and those of an update are not; null: none is missing.
 *
 * @param {ConsoleEvent[]} known newest first
 * @param {ConsoleEvent[]} newest of an update, oldest first
 * @returns {number | null}
 */
export function findGap(known, newest) {
  const last = known.length ? known[0].id : 0;
  return newest.length && newest[0].id > last + 1 ? last : null;
}

/**
 * Return the events that are kept when more arrive, newest first; the same list if none is new.
 *
 * @param {ConsoleEvent[]} known newest first
 * @param {ConsoleEvent[]} more
 * @returns {ConsoleEvent[]}
 */
export function mergeEvents(known, more) {
  const ids = new Set(known.map((event) => event.id));
  const fresh = more.filter((event) => !ids.has(event.id));
  return fresh.length ? [...fresh, ...known].sort((one, other) => other.id - one.id).slice(0, EVENTS_MAX) : known;
}
