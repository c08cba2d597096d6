/** What is asked of records, which of them are kept, and how a JSON text is read. Pure but for the reader's own state. */

/** Records that a page keeps; while it follows, the oldest make room. */
export const KEPT_MAX = 10_000;

/**
 * @typedef {object} Shown
 * @property {number} partition_id
 * @property {number} offset
 * @property {number} timestamp
 * @property {string | null} [message]
 * @property {string} [message_b64]
 * @property {string} [key]
 * @property {string} [key_b64]
 * @property {Record<string, string | null>} [headers]
 * @property {Record<string, string>} [headers_b64]
 */

/**
 * Return the parameters of a look at records. Pure.
 *
 * @param {{ partition: string, start: string, at: string, key: string, search: string, max: string }} form
 * @returns {Record<string, unknown>}
 */
export function toQuery({ partition, start, at, key, search, max }) {
  /** @type {Record<string, unknown>} */
  const query = { partition_id: partition, key, search, max: max || 100 };
  if (start === "offset") query.offset = at;
  else if (start === "time") query.time_ms = new Date(at).getTime();
  else query.from = start;
  if (start === "time" && Number.isNaN(query.time_ms)) throw new Error(`${JSON.stringify(at)} is not a time`);
  if (start === "offset" && !/^\d+$/.test(at)) throw new Error("an offset is a number");
  if (start === "offset" && !partition) throw new Error("an offset needs a partition");
  return query;
}

/**
 * Return the parameters that read a partition on; one that could not be read yet begins with the newest records. Pure.
 *
 * @param {{ key: string, search: string, max: string }} form
 * @param {number} partition
 * @param {number | undefined} offset
 * @returns {Record<string, unknown>}
 */
export function toNextQuery({ key, search, max }, partition, offset) {
  return { partition_id: partition, key, search, max: max || 100, ...(offset === undefined ? { from: "latest" } : { offset }) };
}

/**
 * @typedef {object} Range
 * @property {number} partition_id
 * @property {number} next_offset
 * @property {number} end_offset
 * @property {string} [error] why it could not be read
 */

/**
 * Return the ranges of all partitions, when some of them were read on. Pure.
 *
 * @param {Range[]} known
 * @param {Range[]} more
 */
export function mergeRanges(known, more) {
  return known.map((one) => more.find((each) => each.partition_id === one.partition_id) ?? one);
}

/**
 * Return the records that are kept when more arrive: no record twice, the newest `max`. Pure.
 *
 * @param {Shown[]} known
 * @param {Shown[]} more
 * @param {number} [max]
 */
export function keep(known, more, max = KEPT_MAX) {
  const seen = new Set(known.map((one) => `${one.partition_id}/${one.offset}`));
  const fresh = more.filter((one) => !seen.has(`${one.partition_id}/${one.offset}`));
  return fresh.length ? [...known, ...fresh].slice(-max) : known;
}

/**
 * Reads records of a topic: a look replaces what was read before, and each partition is read on from where it was left.
 * What was asked for before the newest look is not taken: its positions are not those of the look.
 */
export class RecordReader {
  /** @param {(query: Record<string, unknown>) => Promise<any>} ask */
  constructor(ask) {
    this.ask = ask;
    /** @type {Shown[]} */
    this.records = [];
    /** @type {Range[]} */
    this.ranges = [];
    /** What was looked for: to read on is to look for the same. @type {Parameters<typeof toQuery>[0] | null} */
    this.form = null;
    /** @type {Map<number, number>} */
    this.positions = new Map();
    /** Changes when a look begins and when it is taken. */
    this.generation = 0;
  }

  /** Records of the partitions that can be read, beyond those that were. */
  get behind() {
    return this.ranges.reduce((sum, range) => sum + this.behindOf(range), 0);
  }

  /** @param {Range} range */
  behindOf(range) {
    return range.error ? 0 : Math.max(0, range.end_offset - (this.positions.get(range.partition_id) ?? 0));
  }

  /**
   * Read what a form says; return how many records were looked at, or null if a later look has begun.
   *
   * @param {Parameters<typeof toQuery>[0]} form
   * @returns {Promise<number | null>}
   */
  async look(form) {
    const generation = (this.generation += 1);
    const answer = await this.ask(toQuery(form));
    if (generation !== this.generation) return null;
    this.generation += 1;
    this.form = form;
    this.positions = new Map();
    this.records = [];
    this.ranges = answer.partitions;
    this.take(answer);
    return answer.scanned;
  }

  /**
   * Read all partitions on, those that are not at their end again, `turnsMax` times at most; return whether a look
   * replaced it.
   *
   * @param {number} [turnsMax]
   */
  async readOn(turnsMax = 1) {
    const generation = this.generation;
    let ranges = this.ranges;
    for (let turn = 0; turn < turnsMax && ranges.length; turn += 1) {
      for (const range of ranges) {
        const answer = await this.readPartition(range);
        if (generation !== this.generation) return true;
        this.take(answer);
      }
      ranges = this.ranges.filter((range) => this.behindOf(range) > 0);
    }
    return false;
  }

  /** @param {Range} range */
  async readPartition(range) {
    const partition = range.partition_id;
    const form = /** @type {Parameters<typeof toQuery>[0]} */ (this.form);
    try {
      return await this.ask(toNextQuery(form, partition, this.positions.get(partition)));
    } catch (error) {
      const { code, message } = /** @type {import("./api.js").ApiError} */ (error);
      if (code === "unreachable") throw error;
      // Without an offset, what is newest is still there.
      return { records: [], partitions: [{ ...range, error: message, isTrimmed: code === "trimmed" }] };
    }
  }

  /** @param {{ records: Shown[], partitions: Array<Range & { isTrimmed?: boolean }> }} answer */
  take(answer) {
    this.records = keep(this.records, answer.records);
    this.ranges = mergeRanges(this.ranges, answer.partitions);
    for (const range of answer.partitions) {
      if (range.isTrimmed) this.positions.delete(range.partition_id);
      else if (!range.error) this.positions.set(range.partition_id, range.next_offset);
    }
  }
}

/** A number of a JSON text that is shown as it is written there. */
export class WrittenNumber {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
  }
}

/**
 * Keep a number as it is written where JavaScript writes it otherwise; it rounds what has more than 15 digits.
 *
 * @param {string} _
 * @param {unknown} value
 * @param {{ source?: string }} [context]
 */
export function keepNumber(_, value, context) {
  const source = context?.source;
  return typeof value === "number" && source !== undefined && source !== JSON.stringify(value) ? new WrittenNumber(source) : value;
}

/** Whether this browser says how a number is written, as current ones do. */
const KNOWS_SOURCE = parseWritten("1.0") instanceof WrittenNumber;

/** @param {string} text */
function parseWritten(text) {
  return JSON.parse(text, /** @type {any} */ (keepNumber));
}

/**
 * Return the value of a JSON text, or null if it is none. `rounded` is the first number that the value does not have as
 * it is written; empty: there is none.
 *
 * @param {string | null | undefined} text
 * @param {boolean} [knowsSource]
 * @returns {{ value: unknown, rounded: string } | null}
 */
export function parseJson(text, knowsSource = KNOWS_SOURCE) {
  if (!text || !/^\s*[[{"\d\-tfn]/.test(text)) return null;
  try {
    return knowsSource ? { value: parseWritten(text), rounded: "" } : { value: JSON.parse(text), rounded: findRounded(text) };
  } catch {
    return null;
  }
}

/** @param {string} text */
function findRounded(text) {
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g)) {
    if (!token.startsWith('"') && normalize(token) !== normalize(String(Number(token)))) return token;
  }
  return "";
}

/**
 * Return a number without its sign as its digits and exponent, the same for all ways to write it.
 *
 * @param {string} number
 */
function normalize(number) {
  const [, whole = number, fraction = "", exponent = "0"] = /^-?(\d+)(?:\.(\d+))?(?:e([+-]?\d+))?$/i.exec(number) ?? [];
  const digits = `${whole}${fraction}`.replace(/^0+/, "");
  const kept = digits.replace(/0+$/, "");
  return kept && `${kept} ${Number(exponent) - fraction.length + digits.length - kept.length}`;
}
