/** The last minutes of numbers, as columns for charts. Pure but for its own state. */

export const HISTORY_MS = 15 * 60 * 1000;
/** Points of one chart; the oldest are dropped. */
export const POINTS_MAX = 1200;

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

/** The numbers of the cluster, of each node, and the lags of consumers. */
export class History {
  constructor() {
    this.cluster = new Columns();
    this.cpu = new Columns();
    this.memory = new Columns();
    this.lags = new Columns();
  }

  /** @param {HistoryEvent} event */
  load(event) {
    const fresh = new History();
    for (const [timeMs, values, lags] of event.cluster) {
      fresh.cluster.add(timeMs, named(event.series, values));
      fresh.lags.add(timeMs, lagsByName(lags ?? []));
    }
    const at = (/** @type {string} */ name) => event.series.indexOf(name);
    const endMs = event.cluster.length ? event.cluster[event.cluster.length - 1][0] : 0;
    for (const [timeMs, byNode] of slots(event.nodes)) {
      if (timeMs > endMs) break; // not all nodes were measured yet, and updates would be older than it
      fresh.cpu.add(timeMs, mapValues(byNode, (values) => values[at("cpu")]));
      fresh.memory.add(timeMs, mapValues(byNode, (values) => values[at("memory_bytes")]));
    }
    Object.assign(this, fresh);
  }

  /**
   * @param {{ time_ms: number, series: string[], sample: Array<number | null>, lags: Array<[string, string, number]>, nodes: Array<{ node: number, values?: Array<number | null> }> }} update
   */
  add(update) {
    this.cluster.add(update.time_ms, named(update.series, update.sample));
    this.lags.add(update.time_ms, lagsByName(update.lags));
    const byNode = Object.fromEntries(update.nodes.filter((one) => one.values).map((one) => [`node ${one.node}`, one.values ?? []]));
    this.cpu.add(update.time_ms, mapValues(byNode, (values) => values[update.series.indexOf("cpu")]));
    this.memory.add(update.time_ms, mapValues(byNode, (values) => values[update.series.indexOf("memory_bytes")]));
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
 * Return the samples of all nodes by intervals of five seconds: their clocks differ.
 *
 * @param {Record<string, Sample[]>} nodes
 * @returns {Array<[number, Record<string, Array<number | null>>]>}
 */
function slots(nodes) {
  /** @type {Map<number, Record<string, Array<number | null>>>} */
  const found = new Map();
  for (const [node, samples] of Object.entries(nodes)) {
    for (const [timeMs, values] of samples) {
      const slot = Math.ceil(timeMs / 5000) * 5000;
      found.set(slot, { ...found.get(slot), [`node ${node}`]: values });
    }
  }
  return [...found].sort((one, other) => one[0] - other[0]);
}
