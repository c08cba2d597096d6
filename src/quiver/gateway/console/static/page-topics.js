/** All topics: sizes and rates, create, restore. */

import { html, useLoaded, useState } from "./dom.js";
import { bytes, count, parseBytes, parseDuration, retention, time } from "./format.js";
import { api } from "./state.js";
import { Badge, Check, Dialog, ErrorNote, Field, Form, LongTable, Table, refreshMs, tell } from "./ui.js";

/** @param {string} name */
export function topicLink(name) {
  return `#/topics/${encodeURIComponent(name)}`;
}

/** @type {import("./ui.js").Column[]} */
const COLUMNS = [
  { title: "Topic", width: "minmax(180px, 3fr)", sort: (row) => row.topic, cell: (row) => html`<a href=${topicLink(row.topic)}>${row.topic}</a>` },
  { title: "Partitions", width: "100px", isNumber: true, sort: (row) => row.partitions, cell: (row) => html`<span title=${`${row.partitions} with ${row.replicas} replicas each`}>${row.partitions} × ${row.replicas}</span>` },
  { title: "Records", width: "120px", isNumber: true, sort: (row) => row.records ?? null, cell: (row) => count(row.records) },
  { title: "Size", width: "100px", isNumber: true, sort: (row) => row.bytes ?? null, cell: (row) => bytes(row.bytes) },
  { title: "In", width: "100px", isNumber: true, sort: (row) => row.records_per_second ?? null, cell: (row) => (row.records_per_second === undefined ? "–" : `${count(row.records_per_second, true)}/s`) },
  { title: "Retention", width: "minmax(120px, 1fr)", cell: (row) => retention(row.retention) },
  { title: "State", width: "140px", sort: (row) => (row.leaderless ?? 0) * 1e6 + (row.under_replicated ?? 0), cell: (row) => html`<${TopicState} row=${row} />` },
];

/** @param {{ row: any }} properties */
function TopicState({ row }) {
  if (row.leaderless) return html`<${Badge} level="critical">${row.leaderless} leaderless<//>`;
  if (row.under_replicated) return html`<${Badge} level="warning">${row.under_replicated} behind<//>`;
  return html`<${Badge} level="ok">in sync<//>`;
}

export function TopicsPage() {
  const [filter, setFilter] = useState("");
  const [isInternal, setIsInternal] = useState(false);
  const [dialog, setDialog] = useState("");
  const { value, error, reload, isLoading } = useLoaded(() => api.get("/console/topics"), [], (found) => refreshMs(found?.topics.length ?? 0));
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = (value?.topics ?? []).filter((/** @type {any} */ row) => (isInternal || !/^(_|quiver\.)/.test(row.topic)) && words.every((word) => row.topic.toLowerCase().includes(word)));
  const close = () => setDialog("");
  return html`<div class="title"><h1>Topics</h1><div class="buttons">
      <button class="quiet" onClick=${() => setDialog("deleted")}>Deleted topics</button>
      <button class="primary" onClick=${() => setDialog("create")}>Create topic</button>
    </div></div>
    <div class="filters">
      <${Field} label="Filter" type="search" value=${filter} onInput=${setFilter} placeholder="part of a name" />
      <${Check} label="Internal topics" value=${isInternal} onInput=${setIsInternal} />
      <p role="status">${count(rows.length)} of ${count(value?.topics.length ?? 0)} topics</p>
    </div>
    <${ErrorNote} error=${error} />
    ${isLoading ? html`<p class="loading">Loading…</p>` : html`<${LongTable} label="Topics" columns=${COLUMNS} rows=${rows} rowKey=${(/** @type {any} */ row) => row.topic} empty="none match" sortBy=${0} />`}
    ${dialog === "create" && html`<${CreateTopic} onClose=${close} onDone=${reload} />`}
    ${dialog === "deleted" && html`<${DeletedTopics} onClose=${close} onDone=${reload} />`}`;
}

/** @param {{ onClose: () => void, onDone: () => void }} properties */
function CreateTopic({ onClose, onDone }) {
  const [name, setName] = useState("");
  const [partitions, setPartitions] = useState("3");
  const [replicas, setReplicas] = useState("");
  const [age, setAge] = useState("");
  const [size, setSize] = useState("");
  const submit = async () => {
    const limits = { ms: parseDuration(age) ?? undefined, bytes: parseBytes(size) ?? undefined };
    await api.post("/topics", {
      topic_name: name,
      partitions: Number(partitions),
      ...(replicas ? { replicas: Number(replicas) } : {}),
      ...(limits.ms || limits.bytes ? { retention: limits } : {}),
    });
    tell(`Topic ${name} was created.`);
    onDone();
    location.hash = topicLink(name);
  };
  return html`<${Dialog} title="Create topic" onClose=${onClose}>
    <${Form} submit="Create" onSubmit=${submit} onDone=${onClose} onCancel=${onClose} isDisabled=${!name}>
      <${Field} label="Name" value=${name} onInput=${setName} hint="Letters, digits, dots, underscores and hyphens." />
      <${Field} label="Partitions" type="number" value=${partitions} onInput=${setPartitions} />
      <${Field} label="Replicas" type="number" value=${replicas} onInput=${setReplicas} placeholder="3, or one per broker" />
      <${Field} label="Keep for" value=${age} onInput=${setAge} placeholder="forever" hint="Such as 7d, 12h or 30m." />
      <${Field} label="Keep per partition" value=${size} onInput=${setSize} placeholder="everything" hint="Such as 10GiB." />
    <//>
  <//>`;
}

/** @param {{ onClose: () => void, onDone: () => void }} properties */
function DeletedTopics({ onClose, onDone }) {
  const { value, error, reload } = useLoaded(() => api.get("/deleted_topics"), []);
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const restore = async (/** @type {string} */ topic) => {
    try {
      await api.post(`/topics/${encodeURIComponent(topic)}/restore`);
      tell(`Topic ${topic} was restored.`);
      onDone();
      reload();
    } catch (caught) {
      setFailure(/** @type {Error} */ (caught));
    }
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Topic", cell: (row) => row.topic },
    { title: "Partitions", isNumber: true, cell: (row) => row.partitions },
    { title: "Gone for good", cell: (row) => time(row.purge_ms) },
    { title: "", cell: (row) => html`<button onClick=${() => restore(row.topic)}>Restore ${row.topic}</button>` },
  ];
  return html`<${Dialog} title="Deleted topics" onClose=${onClose}>
    <${ErrorNote} error=${error ?? failure} />
    ${value && html`<${Table} label="Deleted topics" columns=${columns} rows=${value.topics} rowKey=${(/** @type {any} */ row) => `${row.topic} ${row.purge_ms}`} />`}
  <//>`;
}
