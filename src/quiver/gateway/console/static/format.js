/** Numbers, times and bytes as people read them. Pure. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/**
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  let number = value;
  while (Math.abs(number) >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? number : number.toFixed(number < 10 ? 2 : 1)} ${UNITS[unit]}`;
}

/**
 * Return a number with its thousands apart; large ones are shortened if `isShort`.
 *
 * @param {number | null | undefined} value
 * @param {boolean} [isShort]
 * @returns {string}
 */
export function count(value, isShort = false) {
  if (value === null || value === undefined) return "–";
  if (isShort && Math.abs(value) >= 10_000) {
    const [size, letter] = Math.abs(value) >= 1e9 ? [1e9, "G"] : Math.abs(value) >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return `${(value / Number(size)).toFixed(1)}${letter}`;
  }
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 });
}

/**
 * @param {number | null | undefined} ms
 * @returns {string}
 */
export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

/**
 * Return a span of time with its two largest units.
 *
 * @param {number | null | undefined} ms
 * @returns {string}
 */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  const seconds = Math.floor(Math.abs(ms) / 1000);
  /** @type {Array<[number, string]>} */
  const units = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, name] = units[first];
  const rest = seconds % size;
  const next = units[first + 1];
  const more = next && Math.floor(rest / next[0]) ? ` ${Math.floor(rest / next[0])} ${next[1]}` : "";
  return `${Math.floor(seconds / size)} ${name}${more}`;
}

/**
 * @param {number | null | undefined} ms
 * @returns {string}
 */
export function time(ms) {
  if (!ms) return "–";
  const date = new Date(ms);
  const pad = (/** @type {number} */ number, digits = 2) => String(number).padStart(digits, "0");
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}.${pad(date.getMilliseconds(), 3)}`;
}

/**
 * @param {number} ms
 * @returns {string}
 */
export function clock(ms) {
  return time(ms).slice(11, 19);
}

/**
 * @param {number | null | undefined} share
 * @returns {string}
 */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

/**
 * Return what a topic's retention says.
 *
 * @param {{ ms?: number | null, bytes?: number | null, until_consumed?: boolean }} limits
 * @returns {string}
 */
export function retention(limits) {
  const parts = [];
  if (limits.ms) parts.push(duration(limits.ms));
  if (limits.bytes) parts.push(bytes(limits.bytes));
  if (limits.until_consumed) parts.push("until consumed");
  return parts.join(", ") || "forever";
}

/**
 * Return lines of a hex dump: the offset, sixteen bytes, and their text.
 *
 * @param {Uint8Array} data
 * @param {number} [linesMax]
 * @returns {string}
 */
export function hexDump(data, linesMax = 4096) {
  const lines = [];
  for (let at = 0; at < data.length && lines.length < linesMax; at += 16) {
    const row = Array.from(data.subarray(at, at + 16));
    const digits = row.map((byte) => byte.toString(16).padStart(2, "0"));
    const hex = `${digits.slice(0, 8).join(" ").padEnd(23)}  ${digits.slice(8).join(" ").padEnd(23)}`;
    const text = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${hex}  ${text}`);
  }
  if (data.length > linesMax * 16) lines.push(`… ${data.length - linesMax * 16} more bytes`);
  return lines.join("\n");
}

/**
 * Return the bytes of a text, or of base64.
 *
 * @param {string | null | undefined} text
 * @param {string | undefined} encoded
 * @returns {Uint8Array}
 */
export function toBytes(text, encoded) {
  if (encoded !== undefined) return Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  return new TextEncoder().encode(text ?? "");
}

/**
 * Parse lines of the form `name: value`; empty lines are left out.
 *
 * @param {string} text
 * @returns {Record<string, string>}
 */
export function parseHeaders(text) {
  /** @type {Record<string, string>} */
  const headers = {};
  for (const line of text.split("\n")) {
    if (!line.trim()) continue;
    const at = line.indexOf(":");
    if (at < 1) throw new Error(`a header is written as name: value, not as ${JSON.stringify(line)}`);
    headers[line.slice(0, at).trim()] = line.slice(at + 1).trim();
  }
  return headers;
}

/**
 * Parse a duration such as 7d, 12h, 30m, 45s or 500ms to milliseconds; empty: null.
 *
 * @param {string} text
 * @returns {number | null}
 */
export function parseDuration(text) {
  if (!text.trim()) return null;
  const found = /^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)\s*$/.exec(text);
  if (!found) throw new Error(`a duration is written as 7d, 12h, 30m, 45s or 500ms, not as ${JSON.stringify(text)}`);
  const sizes = { ms: 1, s: 1000, m: 60_000, min: 60_000, h: 3_600_000, d: 86_400_000 };
  return Math.round(Number(found[1]) * sizes[/** @type {keyof typeof sizes} */ (found[2])]);
}

/**
 * Parse a size such as 10GiB, 512MiB or 1000 to bytes; empty: null.
 *
 * @param {string} text
 * @returns {number | null}
 */
export function parseBytes(text) {
  if (!text.trim()) return null;
  const found = /^\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?\s*$/i.exec(text);
  if (!found) throw new Error(`a size is written as 10GiB, 512MiB or 1000, not as ${JSON.stringify(text)}`);
  const power = ["b", "kib", "mib", "gib", "tib"].indexOf((found[2] ?? "B").toLowerCase());
  return Math.round(Number(found[1]) * 1024 ** power);
}

/** @type {Record<string, string>} */
const EVENTS = { candidate: "campaigns", pre_candidate: "asks for pre-votes" };

/**
 * Return what a replica has seen, in the words of `quiver explain`. Pure.
 *
 * @param {{ kind: string, leader?: number | null, members?: number[], learners?: number[] }} event
 */
export function explainEvent({ kind, leader = null, members = [], learners = [] }) {
  if (kind === "members") return `has the members ${members.join(", ")}${learners.length ? ` and the learners ${learners.join(", ")}` : ""}`;
  if (kind === "transfer") return `begins to transfer its leadership to node ${leader}`;
  if (kind === "leader") return "becomes the leader";
  if (leader !== null) return `follows node ${leader}`;
  return EVENTS[kind] ?? "knows no leader";
}
