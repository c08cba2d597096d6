/** How the cluster is, at a glance. */

import { Chart } from "./chart.js";
import { html } from "./dom.js";
import { bytes, clock, count, duration, milliseconds, percent } from "./format.js";
import { events, history, streamError, update } from "./state.js";
import { useStore } from "./store.js";
import { Badge, Card, Table } from "./ui.js";

const WORDS = { ok: "Healthy", warning: "Attention", critical: "Trouble" };
const perSecond = (/** @type {number | null} */ value) => (value === null ? "–" : `${count(value, true)}/s`);
const bytesPerSecond = (/** @type {number | null} */ value) => (value === null ? "–" : `${bytes(value)}/s`);

export function OverviewPage() {
  const now = useStore(update);
  const error = useStore(streamError);
  if (!now) {
    return html`<h1>Overview</h1>${error ? html`<p class="note critical" role="alert">The cluster cannot be shown: ${error.message}</p>` : html`<p class="loading">Waiting for the first update…</p>`}`;
  }
  return html`<h1 class="hidden">Overview</h1>
    <${Health} now=${now} />
    <${Numbers} now=${now} />
    <div class="charts">
      <${Chart} title="Records" columns=${history.cluster} version=${now.time_ms} format=${perSecond} lines=${[{ name: "in_records", label: "in" }, { name: "out_records", label: "out" }]} />
      <${Chart} title="Bytes" isBytes columns=${history.cluster} version=${now.time_ms} format=${bytesPerSecond} lines=${[{ name: "in_bytes", label: "in" }, { name: "out_bytes", label: "out" }]} />
      <${Chart} title="Time to commit" columns=${history.cluster} version=${now.time_ms} format=${milliseconds} lines=${[{ name: "produce_p50_ms", label: "p50" }, { name: "produce_p99_ms", label: "p99" }]} />
      <${Chart} title="Lag of consumers" isCount columns=${history.cluster} version=${now.time_ms} format=${(/** @type {number | null} */ value) => count(value, true)} lines=${[{ name: "lag_records", label: "records" }]} />
      <${Chart} title="Unhealthy partitions" isCount columns=${history.cluster} version=${now.time_ms} format=${(/** @type {number | null} */ value) => count(value, true)} lines=${[{ name: "under_replicated", label: "under-replicated" }, { name: "leaderless", label: "without leader" }]} />
      <${Chart} title="CPU" columns=${history.cpu} version=${now.time_ms} format=${percent} least=${0.05} lines=${nodeLines(now)} />
    </div>
    <${Nodes} now=${now} />
    <${RecentEvents} />`;
}

/** @param {import("./state.js").Update} now */
export function nodeLines(now) {
  return now.nodes.slice(0, 6).map((node) => ({ name: `node ${node.node}`, label: `node ${node.node}` }));
}

/** @param {{ now: import("./state.js").Update }} properties */
function Health({ now }) {
  const { level, sentence, reasons } = now.health;
  return html`<section class=${`health ${level}`} aria-label="Health">
    <p role="status"><strong>${WORDS[level]}</strong> <span>${sentence}</span></p>
    ${reasons.length > 2 && html`<ul>${reasons.map(([one, text]) => html`<li><${Badge} level=${one}>${one}<//> ${text}</li>`)}</ul>`}
  </section>`;
}

/** @param {{ now: import("./state.js").Update }} properties */
function Numbers({ now }) {
  const at = (/** @type {string} */ name) => now.sample[now.series.indexOf(name)] ?? null;
  const alive = now.nodes.filter((node) => node.is_alive).length;
  const numbers = [
    ["Nodes", `${alive} / ${now.nodes.length}`, "#/cluster"],
    ["Topics", count(now.topics), "#/topics"],
    ["Partitions", count(now.partitions), "#/topics"],
    ["Records in", perSecond(at("in_records")), ""],
    ["p99 commit", milliseconds(at("produce_p99_ms")), ""],
    ["Lag", count(at("lag_records"), true), "#/consumers"],
    ["Consumers", count(now.consumers), "#/consumers"],
    ["Moves", count(now.moves_total), "#/cluster/moves"],
  ];
  return html`<dl class="numbers">${numbers.map(([title, value, link]) => html`<div><dt>${title}</dt><dd>${link ? html`<a href=${link}>${value}</a>` : value}</dd></div>`)}</dl>`;
}

/** @param {{ now: import("./state.js").Update }} properties */
function Nodes({ now }) {
  const value = (/** @type {import("./state.js").ConsoleNode} */ node, /** @type {string} */ name) => node.values?.[now.series.indexOf(name)] ?? null;
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Node", cell: (node) => html`<b>${node.node}</b>${node.node === now.served_by ? " (serves this page)" : ""}` },
    { title: "State", cell: (node) => html`<${NodeState} node=${node} />` },
    { title: "Roles", cell: (node) => `${node.is_primary ? "primary, " : ""}${node.roles.join(", ")}` },
    { title: "Rack", cell: (node) => node.rack || "–" },
    { title: "Leads / replicas", isNumber: true, cell: (node) => `${count(node.leads)} / ${count(node.replicas)}` },
    { title: "In", isNumber: true, cell: (node) => perSecond(value(node, "in_records")) },
    { title: "CPU", isNumber: true, cell: (node) => percent(value(node, "cpu")) },
    { title: "Memory", isNumber: true, cell: (node) => bytes(value(node, "memory_bytes")) },
    { title: "Logs", isNumber: true, cell: (node) => bytes(node.log_bytes) },
    { title: "Disk free", isNumber: true, cell: (node) => bytes(value(node, "disk_free_bytes")) },
    { title: "Up", isNumber: true, cell: (node) => duration(node.uptime_ms) },
    { title: "Version", cell: (node) => node.version || "–" },
  ];
  return html`<${Card} title="Nodes"><${Table} label="Nodes" columns=${columns} rows=${now.nodes} rowKey=${(/** @type {any} */ node) => node.node} /><//>`;
}

/** @param {{ node: import("./state.js").ConsoleNode }} properties */
export function NodeState({ node }) {
  if (!node.is_alive) return html`<${Badge} level="critical">no answer (${node.state})<//>`;
  if (node.problem) return html`<${Badge} level="warning">${node.problem}<//>`;
  return html`<${Badge} level=${node.state === "alive" ? "ok" : "warning"}>${node.state}<//>`;
}

function RecentEvents() {
  const recent = useStore(events).slice(0, 10);
  return html`<${Card} title="Recent events" actions=${html`<a href="#/cluster/events">all events</a>`}><${EventList} events=${recent} /><//>`;
}

/** @param {{ events: import("./state.js").Event_[] }} properties */
export function EventList({ events: shown }) {
  if (!shown.length) return html`<p class="empty">Nothing has happened since this node started.</p>`;
  return html`<ol class="events">${shown.map((event) => html`<li key=${`${event.id} ${event.time_ms}`}>
    <time datetime=${new Date(event.time_ms).toISOString()}>${clock(event.time_ms)}</time> <${Badge} level=${event.level ?? "info"}>${event.kind}<//> ${event.text}
  </li>`)}</ol>`;
}
