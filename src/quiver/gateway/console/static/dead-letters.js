/**
 * Dead letters of a work queue: records of a topic that is a queue itself, whose group settles those that were requeued.
 *
 * A requeue produces a record first and acknowledges its dead letter then: if the page is closed in between, nothing is
 * lost, and the next requeue produces that record once more.
 */

/** Dead letters that are leased at once. */
const BATCH = 100;
/** How long further dead letters are waited for. */
const WAIT_MS = 500;
const OWN = "quiver-dead-";
const DELAY = "quiver-deliver-at";

/**
 * Return the topics that get dead letters, each with those that they come from. Pure.
 *
 * @param {Record<string, string>} byTopic as the API says of a group
 * @returns {Array<[string, string[]]>}
 */
export function deadLetterTopics(byTopic) {
  /** @type {Map<string, string[]>} */
  const found = new Map();
  for (const [topic, dead] of Object.entries(byTopic)) found.set(dead, [...(found.get(dead) ?? []), topic]);
  return [...found];
}

/**
 * Return whether a dead letter is one of a group: several queues may have the same topic for theirs. Pure.
 *
 * @param {{ headers?: Record<string, string> }} letter
 * @param {string} group
 */
export function isLetterOf(letter, group) {
  return (letter.headers?.[`${OWN}group`] ?? group) === group;
}

/**
 * Return the call that sends a dead letter to where it comes from, without the headers that it got as one. Pure.
 *
 * @param {any} job
 * @returns {Record<string, any>}
 */
export function toProduced(job) {
  const headers = job.headers ?? {};
  const topic = headers[`${OWN}topic`];
  if (!topic) throw new Error(`not done: record ${job.partition_id}/${job.offset} does not say where it comes from`);
  const kept = Object.entries(headers).filter(([name]) => !name.startsWith(OWN) && name !== DELAY);
  return {
    topic,
    partition_id: Number(headers[`${OWN}partition`] ?? 0),
    ...(job.message_b64 === undefined ? { message: job.message } : { message_b64: job.message_b64 }),
    ...(job.key === undefined ? {} : { key: job.key }),
    ...(job.key_b64 === undefined ? {} : { key_b64: job.key_b64 }),
    ...(kept.length ? { headers: Object.fromEntries(kept) } : {}),
    ...(job.headers_b64 ? { headers_b64: job.headers_b64 } : {}),
  };
}

/**
 * Send all dead letters of a queue to where they come from; return how many. Those of other queues are passed over.
 *
 * @param {import("./api.js").Api} api
 * @param {string} topic of the dead letters
 * @param {string} group of the queue
 * @param {(count: number) => void} onProgress
 */
export async function requeueAll(api, topic, group, onProgress) {
  const queue = { topic, group: `${group}.dead` };
  /** @type {Map<string, number>} */
  const producers = new Map();
  let count = 0;
  for (;;) {
    const answer = await api.post("/queue/receive", { ...queue, max: BATCH, wait_ms: WAIT_MS });
    if (!answer) return count;
    /** @type {string[]} */
    const passed = answer.jobs.filter((/** @type {any} */ job) => !isLetterOf(job, group)).map((/** @type {any} */ job) => job.receipt);
    /** @type {string[]} */
    const sent = [];
    try {
      for (const job of answer.jobs) {
        if (passed.includes(job.receipt)) continue;
        const call = toProduced(job);
        if (!producers.has(call.topic)) producers.set(call.topic, (await api.post("/producer/register", { topic: call.topic })).producer_id);
        await api.post("/producer/produce", { ...call, producer_id: producers.get(call.topic) });
        sent.push(job.receipt);
      }
    } finally {
      const done = [...passed, ...sent];
      const rest = answer.jobs.map((/** @type {any} */ job) => job.receipt).filter((/** @type {string} */ receipt) => !done.includes(receipt));
      if (done.length) await api.post("/queue/ack", { ...queue, receipts: done });
      if (rest.length) await api.post("/queue/nack", { ...queue, receipts: rest, delay_ms: 0 });
    }
    count += sent.length;
    onProgress(count);
  }
}
