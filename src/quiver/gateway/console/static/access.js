/** Users, grants and quotas as people read them, and the calls that change them. Pure. */

import { bytes, count } from "./format.js";

export const VERBS = ["read", "write", "create", "configure", "delete", "admin"];
export const KINDS = ["topic", "consumer", "producer", "cluster"];

/** A token that ends within this time is marked. */
export const SOON_MS = 7 * 86_400_000;

/**
 * The limits of a quota: name, label, and whether it counts bytes.
 *
 * @type {Array<{ name: string, label: string, isBytes?: boolean }>}
 */
export const LIMITS = [
  { name: "requests_per_second", label: "Requests per second" },
  { name: "mutations_per_second", label: "Changes per second" },
  { name: "bytes_in_per_second", label: "Bytes in per second", isBytes: true },
  { name: "bytes_out_per_second", label: "Bytes out per second", isBytes: true },
  { name: "creations_per_minute", label: "Creations per minute" },
  { name: "long_polls_max", label: "Long polls per node" },
  { name: "connections_max", label: "Connections per node" },
  { name: "topics_max", label: "Topics owned" },
  { name: "partitions_max", label: "Partitions owned" },
  { name: "registrations_max", label: "Producers, consumers and holds" },
  { name: "weight", label: "Weight" },
];

/** @typedef {{ subject: string, verb: string, kind: string, name: string, is_prefix: boolean }} Grant */
/** @typedef {{ token_id: string, user: string, created_ms: number, expires_ms: number | null }} Token */

/**
 * Return the resources of a grant in words.
 *
 * @param {{ kind: string, name: string, is_prefix?: boolean }} grant
 */
export function resourceText({ kind, name, is_prefix: isPrefix }) {
  if (kind === "cluster") return "the cluster";
  if (isPrefix) return name ? `${kind}s ${name}*` : `all ${kind}s`;
  return `${kind} ${name}`;
}

/** @param {Grant} grant */
export function grantText(grant) {
  return `${grant.subject} may ${grant.verb} ${resourceText(grant)}`;
}

/** @param {Grant} grant */
export function grantKey(grant) {
  return `${grant.subject} ${grant.verb} ${grant.kind} ${grant.is_prefix ? "prefix" : "name"} ${grant.name}`;
}

/**
 * Return the grants that a user has, its own first, then those of its roles.
 *
 * @param {Grant[]} grants
 * @param {{ user: string, roles: string[] }} user
 */
export function grantsOf(grants, { user, roles }) {
  return [`user:${user}`, ...roles.map((role) => `role:${role}`)].flatMap((subject) => grants.filter((grant) => grant.subject === subject));
}

/**
 * Return how urgent a token's end is.
 *
 * @param {number | null} expiresMs null: it does not expire
 * @param {number} nowMs
 */
export function expiry(expiresMs, nowMs) {
  if (expiresMs === null) return { level: "info", text: "never" };
  if (expiresMs <= nowMs) return { level: "critical", text: "expired" };
  return { level: expiresMs - nowMs < SOON_MS ? "warning" : "ok", text: "" };
}

/**
 * Return whether a token is the one that a text is; the id in a token's text is no secret.
 *
 * @param {Token} token
 * @param {string} text
 */
export function isTokenOf(token, text) {
  return text.startsWith(`qv_${token.token_id}_`);
}

/**
 * Return the limits of a quota that are set, in words.
 *
 * @param {Record<string, number | null | undefined>} limits
 */
export function limitTexts(limits) {
  return LIMITS.filter(({ name }) => typeof limits[name] === "number").map(({ name, label, isBytes }) => {
    const value = /** @type {number} */ (limits[name]);
    return `${label}: ${value === 0 ? "no limit" : isBytes ? bytes(value) : count(value)}`;
  });
}

/**
 * Return what every page says of nodes that gave up their protection; empty if none did. A node in development mode did
 * not: only its own machine reaches it.
 *
 * @param {Array<{ node: number, security_mode?: string }>} nodes
 */
export function insecureText(nodes) {
  const found = nodes.filter((node) => node.security_mode === "insecure").map((node) => node.node);
  if (!found.length) return "";
  if (found.length === 1) return `Node ${found[0]} is insecure (--insecure): whoever reaches its ports may do everything.`;
  return `Nodes ${found.slice(0, -1).join(", ")} and ${found[found.length - 1]} are insecure (--insecure): whoever reaches their ports may do everything.`;
}

/** What a cluster without users says of itself, by the protection of the node that serves the page. @type {Record<string, string>} */
export const OPEN_TEXTS = {
  development: "This cluster is in development mode: only its own machine reaches it, and it does not ask who its callers are. Users, grants and quotas of users wait for a secure cluster.",
  insecure: "This cluster does not ask who its callers are (--insecure), whichever machine they are on. Users, grants and quotas of users wait for a secure cluster.",
};
