/**
 * The last minutes of numbers, as columns for charts. Pure but for its own state.
 *
 * The history has a sample every five seconds, updates come every second: what is a rate or a latency is averaged over
 * the same five seconds, as it would otherwise look as if it had begun to swing when the page was opened.
 */

export const HISTORY_MS = 15 * 60 * 1000;
/** Points of one chart; the oldest are dropped. */
export const POINTS_MAX = 1200;
/** Time between two points. */
export const STEP_MS = 5000;
/** Time that the first update stands for. */
const UPDATE_MS = 1000;
/** Series that are averaged over a step, and those that are counted in it; the others are as they were last. */
const AVERAGED = ["in_records", "in_bytes", "out_records", "out_bytes", "produce_p50_ms", "produce_p99_ms", "cpu"];
const COUNTED = ["elections"];

/**
 * @typedef {[number, Array<number | null>, Array<[string, string, number]>?]} Sample
 * @typedef {{ series: string[], cluster: Sample[], nodes: Record<string, Sample[]> }} HistoryEvent
 */

/** One column of times, and one per series. */
export class Columns {
  constructor() {
    /** @type {number[]} */
    this.times = [];
    /** @type {Map<string, Array<number | null>>} */
    this.values = new Map();
  }

  /**
   * Append a point; a series that it does not have gets a gap. Points must come in order: an older one is left out.
   *
   * @param {number} timeMs
   * @param {Record<string, number | null>} point
   */
  add(timeMs, point) {
    const seconds = timeMs / 1000;
    if (this.times.length && seconds <= this.times[this.times.length - 1]) return;
    for (const name of Object.keys(point)) {
      if (!this.values.has(name)) this.values.set(name, this.times.map(() => null));
    }
    this.times.push(seconds);
    for (const [name, column] of this.values) column.push(point[name] ?? null);
    this.trim(seconds - HISTORY_MS / 1000);
  }

  /** Take back the newest point. */
  pop() {
    this.times.pop();
    for (const column of this.values.values()) column.pop();
  }

  /** @param {number} firstSeconds */
  trim(firstSeconds) {
    let first = Math.max(0, this.times.length - POINTS_MAX);
    while (first < this.times.length && this.times[first] < firstSeconds) first += 1;
    if (!first) return;
    this.times.splice(0, first);
    for (const [name, column] of this.values) {
      column.splice(0, first);
      if (column.every((value) => value === null)) this.values.delete(name);
    }
  }

  /** @param {string} name */
  column(name) {
    return this.values.get(name) ?? this.times.map(() => null);
  }

  /** @param {string} name */
  last(name) {
    const column = this.values.get(name);
    return column?.length ? column[column.length - 1] : null;
  }
}

/**
 * What was measured until `endMs`, since `beginMs`.
 *
 * @typedef {{ beginMs: number, endMs: number, point: Record<string, number | null> }} Span
 */

/** Makes points of the history, and of updates, which are closer together than the points are. */
export class Steps {
  /**
   * @param {Columns} columns
   * @param {(name: string) => boolean} [isAveraged]
   */
  constructor(columns, isAveraged = () => false) {
    this.columns = columns;
    this.isAveraged = isAveraged;
    /** Those of the last step, oldest first. @type {Span[]} */
    this.spans = [];
    /** The step of the newest point; 0: it is of the history. */
    this.slot = 0;
  }

  /**
   * Append a sample of the history, which is of a whole step.
   *
   * @param {number} timeMs
   * @param {Record<string, number | null>} point
   */
  load(timeMs, point) {
    this.columns.add(timeMs, point);
    this.spans = [{ beginMs: timeMs - STEP_MS, endMs: timeMs, point }];
  }

  /**
   * Append the point of an update, or replace the newest point if that is of the same step.
   *
   * @param {number} timeMs
   * @param {Record<string, number | null>} point
   */
  add(timeMs, point) {
    const last = this.spans[this.spans.length - 1];
    if (last && timeMs <= last.endMs) return;
    // The history has ended some seconds ago: until the first update, its newest sample is the best that is known.
    if (last && !this.slot) last.endMs = Math.max(last.endMs, timeMs - UPDATE_MS);
    this.spans.push({ beginMs: last ? last.endMs : timeMs - UPDATE_MS, endMs: timeMs, point });
    this.spans = this.spans.filter((span) => span.endMs > timeMs - STEP_MS);
    const slot = Math.ceil(timeMs / STEP_MS);
    const isSame = slot === this.slot;
    const shown = Object.fromEntries(Object.entries(point).map(([name, value]) => [name, this.summarize(name, value, timeMs, isSame)]));
    if (isSame) this.columns.pop();
    this.slot = slot;
    this.columns.add(timeMs, shown);
  }

  /**
   * @param {string} name
   * @param {number | null} value
   * @param {number} timeMs
   * @param {boolean} isSame
   */
  summarize(name, value, timeMs, isSame) {
    if (this.isAveraged(name)) return average(this.spans, name, timeMs - STEP_MS);
    return COUNTED.includes(name) && isSame ? (value ?? 0) + (this.columns.last(name) ?? 0) : value;
  }
}

/**
 * Return the mean of a series since some time, each value by the time that it was measured over; null without values.
 *
 * @param {Span[]} spans
 * @param {string} name
 * @param {number} sinceMs
 */
function average(spans, name, sinceMs) {
  let [sum, weights] = [0, 0];
  for (const { beginMs, endMs, point } of spans) {
    const value = point[name] ?? null;
    if (value === null) continue;
    const weight = endMs - Math.max(beginMs, sinceMs);
    sum += value * weight;
    weights += weight;
  }
  return weights ? sum / weights : null;
}

/** The numbers of the cluster, of each node, and the lags of consumers. */
export class History {
  constructor() {
    this.cluster = new Columns();
    this.cpu = new Columns();
    this.memory = new Columns();
    this.lags = new Columns();
    this.steps = {
      cluster: new Steps(this.cluster, (name) => AVERAGED.includes(name)),
      cpu: new Steps(this.cpu, () => true),
      memory: new Steps(this.memory),
      lags: new Steps(this.lags),
    };
  }

  /** @param {HistoryEvent} event */
  load(event) {
    const fresh = new History();
    for (const [timeMs, values, lags] of event.cluster) {
      fresh.steps.cluster.load(timeMs, named(event.series, values));
      fresh.steps.lags.load(timeMs, lagsByName(lags ?? []));
    }
    const at = (/** @type {string} */ name) => event.series.indexOf(name);
    const endMs = event.cluster.length ? event.cluster[event.cluster.length - 1][0] : 0;
    for (const [timeMs, byNode] of slots(event.nodes)) {
      if (timeMs > endMs) break; // not all nodes were measured yet, and updates would be older than it
      fresh.steps.cpu.load(timeMs, mapValues(byNode, (values) => values[at("cpu")]));
      fresh.steps.memory.load(timeMs, mapValues(byNode, (values) => values[at("memory_bytes")]));
    }
    Object.assign(this, fresh);
  }

  /**
   * @param {{ time_ms: number, series: string[], sample: Array<number | null>, lags: Array<[string, string, number]>, nodes: Array<{ node: number, values?: Array<number | null> }> }} update
   */
  add(update) {
    const byNode = Object.fromEntries(update.nodes.filter((one) => one.values).map((one) => [`node ${one.node}`, one.values ?? []]));
    this.steps.cluster.add(update.time_ms, named(update.series, update.sample));
    this.steps.lags.add(update.time_ms, lagsByName(update.lags));
    this.steps.cpu.add(update.time_ms, mapValues(byNode, (values) => values[update.series.indexOf("cpu")]));
    this.steps.memory.add(update.time_ms, mapValues(byNode, (values) => values[update.series.indexOf("memory_bytes")]));
  }
}

/**
 * @param {string[]} series
 * @param {Array<number | null>} values
 */
function named(series, values) {
  return Object.fromEntries(series.map((name, at) => [name, values[at] ?? null]));
}

/** @param {Array<[string, string, number]>} lags */
function lagsByName(lags) {
  return Object.fromEntries(lags.map(([consumer, topic, records]) => [`${consumer} · ${topic}`, records]));
}

/**
 * @param {Record<string, Array<number | null>>} byName
 * @param {(values: Array<number | null>) => number | null} pick
 */
function mapValues(byName, pick) {
  return Object.fromEntries(Object.entries(byName).map(([name, values]) => [name, pick(values) ?? null]));
}

/**
 * Return the samples of all nodes by steps: their clocks differ.
 *
 * @param {Record<string, Sample[]>} nodes
 * @returns {Array<[number, Record<string, Array<number | null>>]>}
 */
function slots(nodes) {
  /** @type {Map<number, Record<string, Array<number | null>>>} */
  const found = new Map();
  for (const [node, samples] of Object.entries(nodes)) {
    for (const [timeMs, values] of samples) {
      const slot = Math.ceil(timeMs / STEP_MS) * STEP_MS;
      found.set(slot, { ...found.get(slot), [`node ${node}`]: values });
    }
  }
  return [...found].sort((one, other) => one[0] - other[0]);
}
