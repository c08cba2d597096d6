/** Consumers, groups and work queues: members, what they have, lag over time, reset with a preview. */

import { Chart } from "./chart.js";
import { deadLetterTopics, isLetterOf, requeueAll } from "./dead-letters.js";
import { html, useLoaded, useState } from "./dom.js";
import { count, duration, time } from "./format.js";
import { topicLink } from "./page-topics.js";
import { consumerLink, groupLink } from "./route.js";
import { api, history, update } from "./state.js";
import { useStore } from "./store.js";
import { Badge, Card, ErrorNote, Field, Form, LongTable, Table, TypedConfirmation, tell } from "./ui.js";

/** @param {{ kind: string, name: string }} properties */
export function ConsumersPage({ kind, name }) {
  if (kind === "consumer" && name) return html`<${ConsumerPage} key=${name} id=${name} />`;
  if (kind === "group" && name) return html`<${GroupPage} key=${name} group=${name} />`;
  return html`<h1>Consumers</h1><${LagChart} /><${Groups} /><${Consumers} />`;
}

/** @param {{ title?: string, of?: string }} properties `of`: a consumer or group; without it, those with the greatest lags */
function LagChart({ title = "Greatest lags", of = "" }) {
  const now = useStore(update);
  const names = [...history.lags.values.keys()].filter((name) => !of || name.startsWith(`${of} · `)).sort((one, other) => (history.lags.last(other) ?? 0) - (history.lags.last(one) ?? 0)).slice(0, 6);
  if (!now || !names.length) return null;
  return html`<div class="charts wide"><${Chart} title=${title} isCount columns=${history.lags} version=${now.time_ms} format=${(/** @type {number | null} */ value) => count(value, true)} lines=${names.map((name) => ({ name, label: name }))} /></div>`;
}

/** @type {Record<string, string>} */
const KINDS = { stream: "group", queue: "work queue" };

/** @param {any} row */
export function kindOf(row) {
  return KINDS[row.group_kind] ?? "consumer";
}

/** @param {any} row */
function totalLag(row) {
  const known = row.topics.map((/** @type {any} */ topic) => topic.lag).filter((/** @type {any} */ lag) => lag !== null);
  return known.length ? known.reduce((/** @type {number} */ sum, /** @type {number} */ lag) => sum + lag, 0) : null;
}

function Consumers() {
  const [filter, setFilter] = useState("");
  const { value, error } = useLoaded(() => api.poll("/consumers"), [], 3000);
  const rows = (value?.consumers ?? []).filter((/** @type {any} */ row) => `${row.id} ${row.name} ${row.topics.map((/** @type {any} */ topic) => topic.topic).join(" ")}`.toLowerCase().includes(filter.toLowerCase()));
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Consumer", width: "minmax(160px, 2fr)", sort: (row) => row.name || String(row.id), cell: (row) => html`<a href=${consumerLink(row)}>${row.name || `consumer ${row.id}`}</a>` },
    { title: "Kind", width: "110px", sort: kindOf, cell: kindOf },
    { title: "State", width: "90px", sort: (row) => (row.is_alive ? 0 : 1), cell: (row) => html`<${Badge} level=${row.is_alive ? "ok" : "info"}>${row.is_alive ? "active" : "idle"}<//>` },
    { title: "Topics", width: "minmax(160px, 2fr)", cell: (row) => row.topics.map((/** @type {any} */ topic, /** @type {number} */ at) => html`${at ? ", " : ""}<a href=${topicLink(topic.topic)}>${topic.topic}</a>`) },
    { title: "Lag", width: "110px", isNumber: true, sort: totalLag, cell: (row) => count(totalLag(row)) },
    { title: "Last seen", width: "215px", sort: (row) => row.last_heartbeat_ms ?? null, cell: (row) => time(row.last_heartbeat_ms) },
  ];
  return html`<${Card} title="Consumers">
    <div class="filters"><${Field} label="Filter" type="search" value=${filter} onInput=${setFilter} placeholder="name, id or topic" /><p role="status">${count(rows.length)} consumers</p></div>
    <${ErrorNote} error=${error} />
    <${LongTable} label="Consumers" columns=${columns} rows=${rows} rowKey=${(/** @type {any} */ row) => row.id} sortBy=${3} isDescending height=${400} />
  <//>`;
}

function Groups() {
  const { value, error } = useLoaded(() => api.poll("/groups"), [], 3000);
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Group", cell: (row) => html`<a href=${groupLink(row.group)}>${row.group}</a>` },
    { title: "Kind", cell: (row) => KINDS[row.kind] ?? row.kind },
    { title: "State", cell: (row) => (row.kind === "queue" ? "–" : html`<${GroupState} state=${row.state} />`) },
    { title: "Members", isNumber: true, cell: (row) => (row.kind === "queue" ? "–" : count(row.members)) },
    { title: "Partitions", isNumber: true, cell: (row) => (row.kind === "queue" ? "–" : `${count(row.partitions - row.unassigned)} / ${count(row.partitions)}`) },
    { title: "Topics", cell: (row) => row.topics.join(", ") },
    { title: "Last rebalance", cell: (row) => (row.last_rebalance_ms ? `${time(row.last_rebalance_ms)}: ${row.last_rebalance_reason}` : "–") },
  ];
  return html`<${Card} title="Groups and work queues"><${ErrorNote} error=${error} />
    ${value && html`<${Table} label="Groups" columns=${columns} rows=${value.groups} rowKey=${(/** @type {any} */ row) => row.group} />`}<//>`;
}

/** @param {{ state: string }} properties */
function GroupState({ state }) {
  const level = state === "stable" ? "ok" : state === "empty" ? "info" : "warning";
  return html`<${Badge} level=${level}>${state}<//>`;
}

/** @type {import("./ui.js").Column[]} */
const CURSOR_COLUMNS = [
  { title: "Topic", cell: (row) => html`<a href=${topicLink(row.topic)}>${row.topic}</a>` },
  { title: "Partition", isNumber: true, cell: (row) => row.partition_id },
  { title: "Cursor", isNumber: true, cell: (row) => count(row.cursor) },
  { title: "First", isNumber: true, cell: (row) => count(row.first_offset) },
  { title: "End", isNumber: true, cell: (row) => count(row.end_offset) },
  { title: "Lag", isNumber: true, cell: (row) => count(row.lag) },
];

/** @param {{ id: string }} properties */
function ConsumerPage({ id }) {
  const { value, error, reload } = useLoaded(() => api.poll(`/consumers/${encodeURIComponent(id)}`), [id], 2000);
  const topics = [...new Set((value?.cursors ?? []).map((/** @type {any} */ one) => one.topic))];
  return html`<nav class="crumbs" aria-label="Where"><a href="#/consumers">Consumers</a> / </nav><h1>Consumer ${id}</h1>
    <${ErrorNote} error=${error} />
    ${value && html`<${Card} title="Positions"><${Table} label="Positions" columns=${CURSOR_COLUMNS} rows=${value.cursors} rowKey=${rowKey} /><//>
      ${value.group_kind ? html`<p class="note info">These are the cursors of the ${kindOf(value)} <a href=${groupLink(value.name)}>${value.name}</a>: look there for what it does, and for what can be done.</p>` : html`<${Reset} topics=${topics} isTopicNeeded name=${id} advice="Stop the consumer first: one that runs overwrites its cursors."
        preview=${async (/** @type {any} */ target) => toChanges((await api.post(`/consumers/${encodeURIComponent(id)}/reset`, { ...target, dry_run: true })).cursors)}
        act=${(/** @type {any} */ target) => api.post(`/consumers/${encodeURIComponent(id)}/reset`, target)} onDone=${reload} />`}`}`;
}

/** @param {any} row */
function rowKey(row) {
  return `${row.topic}/${row.partition_id}`;
}

/** @param {any[]} cursors */
function toChanges(cursors) {
  return cursors.map((one) => ({ topic: one.topic, partition_id: one.partition_id, before: one.cursor, after: one.target, end_offset: one.end_offset }));
}

/** @param {{ group: string }} properties */
function GroupPage({ group }) {
  const path = `/groups/${encodeURIComponent(group)}`;
  const { value, error, reload } = useLoaded(() => api.poll(path), [group], 2000);
  const lag = useLoaded(() => api.poll(`${path}/lag`), [group], 2000);
  const [isDeleting, setIsDeleting] = useState(false);
  const isQueue = value?.group.kind === "queue";
  const remove = async () => {
    await api.removeResource(path);
    tell(`Group ${group} was deleted.`);
    location.hash = "#/consumers";
  };
  /** @type {import("./ui.js").Column[]} */
  const members = [
    { title: "Member", cell: (row) => row.instance ?? row.member_id },
    { title: "Client", cell: (row) => row.client },
    { title: "Rack", cell: (row) => row.rack || "–" },
    { title: "Joined", cell: (row) => `${duration(Date.now() - row.joined_ms)} ago` },
    { title: "Partitions", cell: (row) => row.partitions.map((/** @type {any} */ one) => `${one.topic}/${one.partition_id}${one.state === "revoking" ? " (leaving)" : ""}`).join(", ") || "–" },
  ];
  const lagColumns = [...CURSOR_COLUMNS, { title: "Member", cell: (/** @type {any} */ row) => row.member_id ?? "–" }];
  return html`<nav class="crumbs" aria-label="Where"><a href="#/consumers">Consumers</a> / </nav>
    <div class="title"><h1>Group ${group}</h1><div class="buttons"><button class="quiet danger-text" onClick=${() => setIsDeleting(true)}>Delete group</button></div></div>
    <${ErrorNote} error=${error} />
    ${value && html`<dl class="numbers">
        <div>${isQueue ? html`<dt>Kind</dt><dd>work queue</dd>` : html`<dt>State</dt><dd><${GroupState} state=${value.group.state} /></dd>`}</div>
        <div><dt>Lag</dt><dd>${count(lag.value?.lag)}</dd></div>
        ${!isQueue && html`<div><dt>Members</dt><dd>${count(value.group.members)}</dd></div><div><dt>Rebalances</dt><dd>${count(value.group.rebalances)}</dd></div>`}
      </dl>
      <${LagChart} title="Lag" of=${group} />
      ${!isQueue && html`<${Card} title="Members"><${Table} label="Members" columns=${members} rows=${value.members} rowKey=${(/** @type {any} */ row) => row.member_id} /><//>`}
      ${isQueue ? html`<${QueueState} group=${group} />` : html`<${Card} title="Positions"><${ErrorNote} error=${lag.error} />${lag.value && html`<${Table} label="Positions" columns=${lagColumns} rows=${lag.value.partitions} rowKey=${rowKey} />`}<//>`}
      ${isQueue && deadLetterTopics(value.group.dead_letter_topics).map(([dead, topics]) => html`<${DeadLetters} key=${dead} topics=${topics} dead=${dead} group=${group} />`)}
      ${!isQueue && html`<${Reset} topics=${value.group.topics} name=${group} advice="Stop the members first: a reset is refused while the group has any."
        preview=${async (/** @type {any} */ target) => (await api.post(`${path}/reset`, { ...rename(target), dry_run: true })).cursors}
        act=${(/** @type {any} */ target) => api.post(`${path}/reset`, rename(target))} onDone=${reload} />`}`}
    ${isDeleting && html`<${TypedConfirmation} title="Delete group" name=${group} submit="Delete" warning="Its cursors are forgotten; a consumer that uses the name again begins from the start." onSubmit=${remove} onClose=${() => setIsDeleting(false)} />`}`;
}

/** @type {Record<string, string>} */
const STALLS = { empty: "nothing is left", in_flight_max: "too many jobs are under way", waiting: "the rest waits for its time", key_order: "the rest waits for earlier records of its keys" };

/** @type {import("./ui.js").Column[]} */
const QUEUE_COLUMNS = [
  { title: "Topic", cell: (row) => html`<a href=${topicLink(row.topic)}>${row.topic}</a>` },
  { title: "Partition", isNumber: true, cell: (row) => row.partition_id },
  { title: "Ready", isNumber: true, cell: (row) => count(row.ready) },
  { title: "Leased", isNumber: true, cell: (row) => count(row.leased) },
  { title: "Waiting", isNumber: true, cell: (row) => count(row.waiting) },
  { title: "Dying", isNumber: true, cell: (row) => count(row.dying) },
  { title: "Settled before", isNumber: true, cell: (row) => count(row.cursor) },
  { title: "End", isNumber: true, cell: (row) => count(row.end_offset) },
  { title: "Why nothing is delivered", cell: (row) => html`${row.stall === "in_flight_max" ? html`<${Badge} level="warning">${STALLS.in_flight_max}<//>` : (STALLS[row.stall] ?? row.stall) || "–"}` },
];

/** @param {{ group: string }} properties */
function QueueState({ group }) {
  const { value, error } = useLoaded(() => api.poll(`/groups/${encodeURIComponent(group)}/queue`), [group], 2000);
  return html`<${Card} title="Jobs"><${ErrorNote} error=${error} />
    ${value && html`<p>A job belongs to its worker for ${duration(value.settings.lease_ms)}; ${value.settings.max_attempts ? `after ${value.settings.max_attempts} deliveries it is a dead letter` : "it is delivered as often as it takes"}; at most ${count(value.settings.in_flight_max)} of a partition are under way${value.settings.order === "key" ? ", one of a key at a time" : ""}.</p>
      <${Table} label="Jobs" columns=${QUEUE_COLUMNS} rows=${value.partitions} rowKey=${rowKey} />`}<//>`;
}

/** @param {{ topics: string[], dead: string, group: string }} properties `dead`: the topic of the dead letters, as the group's settings say */
function DeadLetters({ topics, dead, group }) {
  const topic = topics.join(", ");
  const { value, error, reload } = useLoaded(() => api.get(`/topics/${encodeURIComponent(dead)}/records`, { from: "latest", max: 100 }), [dead], 3000);
  const left = useLoaded(() => api.poll(`/groups/${encodeURIComponent(`${group}.dead`)}/lag`), [group], 3000);
  const [done, setDone] = useState(0);
  if (/** @type {any} */ (error)?.code === "unknown_topic") return html`<${Card} title=${`Dead letters of ${topic}`}><p class="empty">There are none: no job failed too often, or was rejected. They would go to the topic ${dead}.</p><//>`;
  const header = (/** @type {any} */ row, /** @type {string} */ name) => row.headers?.[`quiver-dead-${name}`] ?? "";
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Letter", cell: (row) => `${row.partition_id}:${row.offset}` },
    { title: "From", cell: (row) => `${header(row, "topic")}/${header(row, "partition")}:${header(row, "offset")}` },
    { title: "Attempts", isNumber: true, cell: (row) => header(row, "attempts") },
    { title: "Died", cell: (row) => time(Number(header(row, "time"))) },
    { title: "Reason", cell: (row) => header(row, "reason") || "–" },
    { title: "Value", cell: (row) => html`<span class="value">${(row.message ?? `${row.message_b64 ?? "null"}`).slice(0, 80)}</span>` },
  ];
  const act = async () => {
    setDone(0);
    const requeued = await requeueAll(api, dead, group, setDone);
    tell(`${requeued} dead letters were requeued.`);
    reload();
    left.reload();
  };
  const total = value?.partitions.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.end_offset - one.first_offset, 0) ?? 0;
  return html`<${Card} title=${`Dead letters of ${topic}`}>
    <${ErrorNote} error=${error} />
    <p role="status">${count(left.value ? left.value.lag : total)} left of ${count(total)} in <a href=${topicLink(dead)}>${dead}</a>${done ? `; ${count(done)} requeued` : ""}. The newest, requeued ones included:</p>
    ${value && html`<${Table} label="Dead letters" columns=${columns} rows=${value.records.filter((/** @type {any} */ row) => isLetterOf(row, group)).reverse()} rowKey=${(/** @type {any} */ row) => `${row.partition_id}:${row.offset}`} />`}
    <p>A requeue sends them to ${topic} as new records, for every group of that topic.</p>
    <${Form} submit="Requeue all" onSubmit=${act} />
  <//>`;
}

/** @param {any} target */
function rename({ time_ms: timestamp, ...rest }) {
  return timestamp === undefined ? rest : { ...rest, timestamp };
}

/**
 * Choose where cursors go, look at what that means, then do it.
 *
 * @param {{ topics: string[], name: string, advice: string, isTopicNeeded?: boolean, preview: (target: any) => Promise<any[]>, act: (target: any) => Promise<unknown>, onDone: () => void }} properties
 */
function Reset({ topics, name, advice, isTopicNeeded = false, preview, act, onDone }) {
  const [topic, setTopic] = useState(isTopicNeeded ? (topics[0] ?? "") : "");
  const [to, setTo] = useState("earliest");
  const [at, setAt] = useState("");
  const [plan, setPlan] = useState(/** @type {any[] | null} */ (null));
  const target = () => {
    /** @type {Record<string, unknown>} */
    const given = topic ? { topic } : {};
    if (to === "offset") given.offset = Number(at);
    else if (to === "time") given.time_ms = new Date(at).getTime();
    else given.to = to;
    return given;
  };
  const change = (/** @type {(value: string) => void} */ setter) => (/** @type {string} */ value) => {
    setter(value);
    setPlan(null);
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Topic", cell: (row) => row.topic },
    { title: "Partition", isNumber: true, cell: (row) => row.partition_id },
    { title: "Cursor now", isNumber: true, cell: (row) => count(row.before) },
    { title: "Cursor then", isNumber: true, cell: (row) => html`<b>${count(row.after)}</b>` },
    { title: "Effect", cell: (row) => (row.after === row.before ? "none" : row.after < row.before ? `${count(row.before - row.after)} records again` : `${count(row.after - row.before)} records skipped`) },
    { title: "Lag then", isNumber: true, cell: (row) => count(row.end_offset - row.after) },
  ];
  /** @type {Array<[string, string]>} */
  const choices = [...(isTopicNeeded ? [] : [/** @type {[string, string]} */ (["", "all"])]), ...topics.map((one) => /** @type {[string, string]} */ ([one, one]))];
  return html`<${Card} title="Reset">
    <p>${advice}</p>
    <${Form} submit="Preview" onSubmit=${async () => setPlan(await preview(target()))} isDisabled=${(to === "offset" || to === "time") && !at}>
      <${Field} label="Topic" value=${topic} onInput=${change(setTopic)} options=${choices} />
      <${Field} label="To" value=${to} onInput=${change(setTo)} options=${[["earliest", "the oldest record"], ["latest", "the end"], ["offset", "an offset"], ["time", "a time"]]} />
      ${to === "offset" && html`<${Field} label="Offset" type="number" value=${at} onInput=${change(setAt)} />`}
      ${to === "time" && html`<${Field} label="Time" type="datetime-local" value=${at} onInput=${change(setAt)} />`}
    <//>
    ${plan && html`<${Table} label="Preview" columns=${columns} rows=${plan} rowKey=${rowKey} />
      <${Form} submit=${`Reset ${name}`} isDangerous onSubmit=${() => act(target())} onDone=${() => { setPlan(null); tell(`${name} was reset.`); onDone(); }} onCancel=${() => setPlan(null)} />`}
  <//>`;
}
