/** Nodes and what operators do with them; moves, elections, holds, settings, events, and the explanation of a partition. */

import { Chart } from "./chart.js";
import { html, useLoaded, useState } from "./dom.js";
import { bytes, count, duration, explainEvent, percent, time } from "./format.js";
import { tellMoves } from "./moves.js";
import { EventList, NodeState, nodeLines } from "./page-overview.js";
import { api, events, history, movesStart, update } from "./state.js";
import { useStore } from "./store.js";
import { Badge, Card, Dialog, ErrorNote, Field, Form, LongTable, NoPage, Table, TypedConfirmation, tell } from "./ui.js";

const TABS = [["nodes", "Nodes"], ["moves", "Moves"], ["events", "Events"], ["holds", "Holds"], ["settings", "Settings"], ["explain", "Explain"], ["audit", "Audit"]];

/** @param {{ tab: string, about: string[] }} properties */
export function ClusterPage({ tab, about }) {
  const now = useStore(update);
  return html`<h1>Cluster</h1>
    <nav class="tabs" aria-label="Views of the cluster"><ul>
      ${TABS.map(([name, title]) => html`<li><a href=${`#/cluster/${name}`} aria-current=${tab === name ? "page" : undefined}>${title}</a></li>`)}
    </ul></nav>
    ${!TABS.some(([name]) => name === tab) && html`<${NoPage} />`}
    ${tab === "explain" ? html`<${ExplainTab} key=${about.join("/")} about=${about} />` : tab === "settings" ? html`<${SettingsTab} />` : tab === "audit" ? html`<${AuditTab} />` : ""}
    ${now && (tab === "nodes" ? html`<${NodesTab} now=${now} />` : tab === "moves" ? html`<${MovesTab} now=${now} />` : tab === "events" ? html`<${EventsTab} now=${now} />` : tab === "holds" ? html`<${HoldsTab} />` : "")}`;
}

/** @param {{ now: import("./state.js").Update }} properties */
function NodesTab({ now }) {
  const [dialog, setDialog] = useState(/** @type {{ kind: string, node: number } | null} */ (null));
  const close = () => setDialog(null);
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Node", cell: (node) => html`<b>${node.node}</b>` },
    { title: "State", cell: (node) => html`<${NodeState} node=${node} />` },
    { title: "Roles", cell: (node) => `${node.is_primary ? "primary, " : ""}${node.roles.join(", ")}` },
    { title: "HTTP", cell: (node) => node.http_address || "–" },
    { title: "Wire", cell: (node) => node.wire_address },
    { title: "Replicas", isNumber: true, cell: (node) => count(node.replicas) },
    { title: "Leads", isNumber: true, cell: (node) => count(node.leads) },
    { title: "Logs", isNumber: true, cell: (node) => bytes(node.log_bytes) },
    {
      title: "Actions",
      cell: (node) => html`<span class="buttons">
        ${node.state === "draining" || node.state === "drained" ? html`<button onClick=${() => setDialog({ kind: "undrain", node: node.node })}>Use again<span class="hidden"> node ${node.node}</span></button>` : html`<button onClick=${() => setDialog({ kind: "drain", node: node.node })}>Drain<span class="hidden"> node ${node.node}</span></button>`}
        ${node.state === "drained" || node.state === "dead" ? html`<button class="danger-text" onClick=${() => setDialog({ kind: "remove", node: node.node })}>Remove<span class="hidden"> node ${node.node}</span></button>` : ""}
      </span>`,
    },
  ];
  const acts = {
    drain: () => api.post(`/brokers/${dialog?.node}/drain`),
    undrain: () => api.remove(`/brokers/${dialog?.node}/drain`),
    rebalance: () => api.post("/cluster/rebalance"),
  };
  const done = () => {
    tell("The cluster has begun; follow it under Moves.");
    close();
  };
  return html`<${Card} title="Nodes" actions=${html`<button onClick=${() => setDialog({ kind: "add", node: 0 })}>Add a node</button> <button onClick=${() => setDialog({ kind: "rebalance", node: 0 })}>Rebalance</button>`}>
      <${Table} label="Nodes" columns=${columns} rows=${now.nodes} rowKey=${(/** @type {any} */ node) => node.node} />
    <//>
    <${Managers} />
    <div class="charts">
      <${Chart} title="CPU" columns=${history.cpu} version=${now.time_ms} format=${percent} least=${0.05} lines=${nodeLines(now)} />
      <${Chart} title="Memory" isBytes columns=${history.memory} version=${now.time_ms} format=${bytes} lines=${nodeLines(now)} />
    </div>
    ${dialog && dialog.kind in acts && html`<${Dialog} title=${titleOf(dialog)} onClose=${close}>
      <${Form} submit=${titleOf(dialog)} onSubmit=${acts[/** @type {keyof typeof acts} */ (dialog.kind)]} onDone=${done} onCancel=${close}><p>${explainAct(dialog, now)}</p><//>
    <//>`}
    ${dialog?.kind === "add" && html`<${AddNode} now=${now} onClose=${close} />`}
    ${dialog?.kind === "remove" && html`<${TypedConfirmation} title=${`Remove node ${dialog.node}`} name=${`node ${dialog.node}`} submit="Remove" warning="Its data directory is worthless afterwards: it can come back only as a new node." onSubmit=${() => api.remove(`/brokers/${dialog.node}`)} onClose=${close} />`}`;
}

/** @param {{ kind: string, node: number }} dialog */
function titleOf({ kind, node }) {
  return { drain: `Drain node ${node}`, undrain: `Use node ${node} again`, rebalance: "Rebalance" }[kind] ?? "";
}

/**
 * @param {{ kind: string, node: number }} dialog
 * @param {import("./state.js").Update} now
 */
function explainAct({ kind, node }, now) {
  const found = now.nodes.find((one) => one.node === node);
  if (kind === "drain") return `All ${count(found?.replicas)} replicas of node ${node} move to other nodes; it serves until they have.`;
  if (kind === "undrain") return `Node ${node} may hold replicas again; a rebalance brings it some.`;
  return "Replicas move, a few at a time, until every node holds its share. Producers and consumers go on.";
}

/** @param {{ now: import("./state.js").Update, onClose: () => void }} properties */
function AddNode({ now, onClose }) {
  const managers = now.nodes.filter((node) => node.roles.includes("manager")).map((node) => `${node.node}@${node.wire_address}`).join(",");
  const next = Math.max(0, ...now.nodes.map((node) => node.node)) + 1;
  const isSecure = now.security_mode === "secure";
  return html`<${Dialog} title="Add a node" onClose=${onClose}>
    <p>Start this on the machine that joins, with addresses that the other nodes reach:</p>
    <pre tabindex="0">quiver node --id ${next} --roles broker,gateway --data ./node-${next} \\
  --http HOST:8002 --wire HOST:9002 --join ${managers}</pre>
    ${isSecure && html`<p>A secure cluster also asks for a certificate of the new node: <code>quiver security join</code> gets one with a join token.</p>`}
    <p>It appears in this list when it has joined. Then rebalance.</p>
  <//>`;
}

function Managers() {
  const { value, error } = useLoaded(() => api.get("/managers"), [], 3000);
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Node", cell: (row) => row.node },
    { title: "Role", cell: (row) => html`<${Badge} level=${row.role === "primary" ? "ok" : "info"}>${row.role}<//>` },
    { title: "Applied index", isNumber: true, cell: (row) => count(row.applied_index) },
    { title: "HTTP", cell: (row) => row.http_address || "–" },
  ];
  return html`<${Card} title="Managers"><${ErrorNote} error=${error} />${value && html`<${Table} label="Managers" columns=${columns} rows=${value.managers} rowKey=${(/** @type {any} */ row) => row.node} />`}<//>`;
}

/** @param {{ now: import("./state.js").Update }} properties */
function MovesTab({ now }) {
  const start = useStore(movesStart);
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Partition", cell: (row) => html`<a href=${`#/cluster/explain/${encodeURIComponent(row.topic)}/${row.partition}`}>${row.topic}/${row.partition}</a>` },
    { title: "From", cell: (row) => (row.source === null ? "additional replica" : `node ${row.source}`) },
    { title: "To", cell: (row) => `node ${row.target}` },
    { title: "State", cell: (row) => row.state },
    { title: "Since", cell: (row) => duration(now.time_ms - row.begun_ms) },
  ];
  return html`<${Card} title="Moves and rebuilds">
    ${now.is_rebalancing && html`<p class="note info">A rebalance is in progress.</p>`}
    <ul class="plain" aria-label="In progress">${tellMoves(start, now).map((sentence) => html`<li key=${sentence}>${sentence}</li>`)}</ul>
    <${Table} label="Moves" columns=${columns} rows=${now.moves} rowKey=${(/** @type {any} */ row) => `${row.topic}/${row.partition}/${row.target}`} empty="no replica is on its way" />
  <//>`;
}

/** @param {{ now: import("./state.js").Update }} properties */
function EventsTab({ now }) {
  const [kind, setKind] = useState("");
  const all = useStore(events);
  /** @type {Array<[string, string]>} */
  const kinds = [["", "all"], ...[...new Set(all.map((event) => event.kind))].sort().map((one) => /** @type {[string, string]} */ ([one, one]))];
  const shown = all.filter((event) => !kind || event.kind === kind);
  return html`<div class="charts wide"><${Chart} title="Elections" isCount columns=${history.cluster} version=${now.time_ms} format=${(/** @type {number | null} */ value) => count(value)} lines=${[{ name: "elections", label: "won" }]} /></div>
    <${Card} title="Events" actions=${html`<${Field} label="Kind" value=${kind} onInput=${setKind} options=${kinds} />`}>
      <p>What node ${now.served_by} has seen since it started, newest first.</p>
      <${EventList} events=${shown} />
    <//>`;
}

function HoldsTab() {
  const { value, error } = useLoaded(() => api.get("/cluster/holds"), [], 3000);
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Hold", cell: (row) => row.name },
    { title: "Topic", cell: (row) => row.topic },
    { title: "Owner", cell: (row) => row.owner || "–" },
    { title: "Placed", cell: (row) => time(row.placed_ms) },
    { title: "Expires", cell: (row) => time(row.expires_ms) },
    { title: "First held offsets", cell: (row) => Object.entries(row.offsets).map(([partition, offset]) => `${partition}: ${offset}`).join(", ") },
  ];
  return html`<${Card} title="Holds"><p>Records that retention keeps for readers without a cursor, such as Spark queries.</p><${ErrorNote} error=${error} />
    ${value && html`<${Table} label="Holds" columns=${columns} rows=${value.holds} rowKey=${(/** @type {any} */ row) => `${row.topic} ${row.name}`} />`}<//>`;
}

function SettingsTab() {
  const now = useStore(update);
  const [node, setNode] = useState("");
  const [filter, setFilter] = useState("");
  const { value, error } = useLoaded(() => api.get("/cluster/settings", { node }), [node]);
  const rows = (value?.settings ?? []).filter((/** @type {any} */ row) => `${row.key} ${row.description}`.toLowerCase().includes(filter.toLowerCase()));
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Setting", width: "minmax(220px, 2fr)", sort: (row) => row.key, cell: (row) => html`<span title=${row.description}>${row.key}</span>` },
    { title: "Value", width: "minmax(120px, 1fr)", cell: (row) => (row.value === row.default ? row.value || "–" : html`<b>${row.value || "–"}</b>`) },
    { title: "Default", width: "minmax(120px, 1fr)", cell: (row) => row.default || "–" },
    { title: "Source", width: "minmax(140px, 1fr)", sort: (row) => row.source, cell: (row) => (row.source === "default" ? "default" : html`<${Badge} level="info">${row.source}<//>`) },
  ];
  return html`<${Card} title="Settings in force"><div class="filters">
      <${Field} label="Node" value=${node} onInput=${setNode} options=${[["", "the one that serves this page"], ...(now?.nodes ?? []).map((one) => /** @type {[string, string]} */ ([String(one.node), `node ${one.node}`]))]} />
      <${Field} label="Filter" type="search" value=${filter} onInput=${setFilter} placeholder="part of a key" />
    </div><${ErrorNote} error=${error} />
    <${LongTable} label="Settings" columns=${columns} rows=${rows} rowKey=${(/** @type {any} */ row) => row.key} /><//>`;
}

/** @param {{ about: string[] }} properties */
function ExplainTab({ about }) {
  const [topic, setTopic] = useState(about[0] ?? "");
  const [partition, setPartition] = useState(about[1] ?? "0");
  const [found, setFound] = useState(/** @type {any} */ (null));
  const explain = async () => setFound((await api.get("/explain", { topic, partition_id: partition })).explanation);
  const first = useLoaded(async () => (about[0] ? explain() : null), []);
  return html`<${Card} title="Explain a partition">
      <${Form} submit="Explain" onSubmit=${explain} isDisabled=${!topic}>
        <${Field} label="Topic" value=${topic} onInput=${setTopic} /><${Field} label="Partition" type="number" value=${partition} onInput=${setPartition} />
      <//><${ErrorNote} error=${first.error} />
    <//>${found && html`<${Explanation} found=${found} />`}`;
}

/** @param {{ found: any }} properties */
function Explanation({ found }) {
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Node", cell: (row) => row.node },
    { title: "Role", cell: (row) => (row.is_learner ? "learner" : (row.report?.role ?? "–")) },
    { title: "Node state", cell: (row) => row.node_state },
    { title: "Lag", isNumber: true, cell: (row) => count(row.lag_records) },
    { title: "Says", cell: (row) => row.error || (row.report ? "answers" : "–") },
  ];
  const obstacles = (/** @type {any[]} */ list) => (list.length ? html`<ul>${list.map((one) => html`<li class="note warning">${one.sentence ?? one.text ?? JSON.stringify(one)}</li>`)}</ul>` : html`<p><${Badge} level="ok">nothing is in the way<//></p>`);
  return html`<${Card} title=${`${found.topic}/${found.partition}`}>
    <dl class="facts"><dt>Leader</dt><dd>${found.leader === null ? "none" : `node ${found.leader}`} (epoch ${found.epoch}${found.since_ms ? `, since ${time(found.since_ms)}` : ""})</dd>
      <dt>In sync</dt><dd>${found.in_sync.map((/** @type {number} */ node) => `node ${node}`).join(", ") || "–"}</dd>
      <dt>Offsets</dt><dd>${count(found.first_offset)} – ${count(found.high_watermark)}</dd></dl>
    <h3>Producing</h3>${obstacles(found.produce_obstacles)}<h3>Consuming</h3>${obstacles(found.consume_obstacles)}
    <h3>Replicas</h3><${Table} label="Replicas" columns=${columns} rows=${found.replicas} rowKey=${(/** @type {any} */ row) => row.node} />
    <h3>Elections and changes of members</h3>
    <ol class="events">${found.events.slice(-50).reverse().map((/** @type {any} */ one) => html`<li><time>${time(one.event.at_ms)}</time> node ${one.node} ${explainEvent(one.event)}, epoch ${one.event.epoch}</li>`)}</ol>
    ${found.unanswered.map((/** @type {string} */ text) => html`<p class="note warning">${text}</p>`)}
  <//>`;
}

function AuditTab() {
  const { value, error } = useLoaded(() => api.get("/topics/quiver.audit/records", { from: "latest", max: 1000 }), [], 5000);
  const rows = (value?.records ?? []).map((/** @type {any} */ one) => ({ ...parse(one.message), at: one.timestamp, id: `${one.partition_id}/${one.offset}` })).reverse();
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Time", width: "215px", cell: (row) => time(row.at) },
    { title: "Who", width: "minmax(120px, 1fr)", cell: (row) => row.principal ?? "–" },
    { title: "What", width: "minmax(140px, 1fr)", cell: (row) => row.request ?? row.event ?? "–" },
    { title: "On", width: "minmax(140px, 1fr)", cell: (row) => row.resource ?? "–" },
    { title: "Outcome", width: "120px", cell: (row) => row.outcome ?? row.result ?? "–" },
  ];
  if (/** @type {any} */ (error)?.code === "unknown_topic") return html`<p class="empty">Only secure clusters write an audit log, to the topic quiver.audit; this one has none.</p>`;
  return html`<${Card} title="Audit"><${ErrorNote} error=${error} /><${LongTable} label="Audit" columns=${columns} rows=${rows} rowKey=${(/** @type {any} */ row) => row.id} /><//>`;
}

/** @param {string | null | undefined} text */
function parse(text) {
  try {
    return JSON.parse(text ?? "{}");
  } catch {
    return {};
  }
}
