/** How far moves and rebuilds of replicas are, in sentences. Pure. */

import { bytes, clock, count } from "./format.js";

/**
 * How many moves had ended when counting began: few moves are in progress at a time, so that how many there will be in
 * all is not known.
 *
 * @typedef {{ ended: number, timeMs: number }} MovesStart
 * @typedef {Pick<import("./state.js").Update, "time_ms" | "is_rebalancing" | "moves_total" | "moves_ended" | "nodes">} Moving
 */

/**
 * Return from when on ended moves are counted: the last moment at which there was nothing to move, as far as is known.
 *
 * @param {MovesStart | null} start
 * @param {Moving} now
 * @returns {MovesStart}
 */
export function countFrom(start, now) {
  const isIdle = !now.moves_total && !now.is_rebalancing && !now.nodes.some((node) => node.state === "draining");
  return start && !isIdle && start.ended <= now.moves_ended ? start : { ended: now.moves_ended, timeMs: now.time_ms };
}

/**
 * Return what is in progress, sentence by sentence; nothing if nothing is.
 *
 * @param {MovesStart | null} start
 * @param {Moving} now
 * @returns {string[]}
 */
export function tellMoves(start, now) {
  const ended = start ? now.moves_ended - start.ended : 0;
  const isMoving = now.moves_total > 0 || ended > 0;
  return [
    ...(isMoving ? [`${moves(now.moves_total)} in progress${start ? `, ${count(ended)} ended since ${clock(start.timeMs).slice(0, 5)}` : ""}.`] : []),
    ...now.nodes.filter((node) => node.state === "draining").map((node) => `Node ${node.node} is being drained: ${replicas(node.replicas)} left on it.`),
    ...now.nodes.filter((node) => (node.rebuild_bytes ?? 0) >= 1).map((node) => `Node ${node.node} still gets about ${bytes(Math.round(node.rebuild_bytes ?? 0))} for ${replicas(node.rebuild_replicas)}.`),
  ];
}

/** @param {number} number */
function moves(number) {
  return `${count(number)} ${number === 1 ? "move" : "moves"}`;
}

/** @param {number | undefined} number */
function replicas(number) {
  return `${number === undefined ? "an unknown number of" : count(number)} ${number === 1 ? "replica" : "replicas"}`;
}
