/** One topic: where its partitions are, its records, consumers and configuration. */

import { html, useLoaded, useState } from "./dom.js";
import { bytes, count, parseBytes, parseDuration, parseHeaders, retention } from "./format.js";
import { kindOf } from "./page-consumers.js";
import { topicLink } from "./page-topics.js";
import { placement, skew } from "./partitions.js";
import { RecordsTab } from "./records.js";
import { consumerLink } from "./route.js";
import { api, update } from "./state.js";
import { useStore } from "./store.js";
import { Badge, Card, Check, Dialog, ErrorNote, Field, Form, NoPage, Table, TypedConfirmation, tell } from "./ui.js";

const TABS = [["partitions", "Partitions"], ["records", "Records"], ["consumers", "Consumers"], ["configuration", "Configuration"]];

/** The producers of this page, by topic: one each, however many records it produces. @type {Map<string, number>} */
const producers = new Map();

/** @param {string} topic */
async function findProducer(topic) {
  const known = producers.get(topic);
  if (known !== undefined) return known;
  const { producer_id: id } = await api.post("/producer/register", { topic });
  producers.set(topic, id);
  return id;
}

/** @param {{ topic: string, tab: string }} properties */
export function TopicPage({ topic, tab }) {
  const path = `/topics/${encodeURIComponent(topic)}`;
  const { value, error, reload } = useLoaded(() => (tab === "partitions" ? api.poll(path) : api.get(path)), [topic, tab], tab === "partitions" ? 2000 : 0);
  const [dialog, setDialog] = useState("");
  const close = () => setDialog("");
  const remove = async () => {
    await api.removeResource(path);
    producers.delete(topic);
    tell(`Topic ${topic} was deleted; it can be restored for a while.`);
    location.hash = "#/topics";
  };
  return html`<nav class="crumbs" aria-label="Where"><a href="#/topics">Topics</a> / </nav>
    <div class="title"><h1>${topic}</h1>${value && html`<div class="buttons">
      <button class="quiet danger-text" onClick=${() => setDialog("delete")}>Delete topic</button>
      <button class="primary" onClick=${() => setDialog("produce")}>Produce record</button>
    </div>`}</div>
    <nav class="tabs" aria-label="Views of the topic"><ul>
      ${TABS.map(([name, title]) => html`<li><a href=${`${topicLink(topic)}/${name}`} aria-current=${tab === name ? "page" : undefined}>${title}</a></li>`)}
    </ul></nav>
    <${ErrorNote} error=${error} />
    ${value && html`<${Tab} tab=${tab} topic=${value} reload=${reload} />`}
    ${dialog === "delete" && html`<${TypedConfirmation} title="Delete topic" name=${topic} submit="Delete" warning=${`Producers and consumers of ${topic} fail from now on. It can be restored until it is purged.`} onSubmit=${remove} onClose=${close} />`}
    ${dialog === "produce" && value && html`<${ProduceRecord} topic=${topic} partitions=${value.partitions.length} onClose=${close} onDone=${reload} />`}`;
}

/** @param {{ tab: string, topic: any, reload: () => void }} properties */
function Tab({ tab, topic, reload }) {
  if (tab === "records") return html`<${RecordsTab} topic=${topic.topic} partitions=${topic.partitions.length} />`;
  if (tab === "consumers") return html`<${ConsumersTab} topic=${topic.topic} />`;
  if (tab === "configuration") return html`<${ConfigurationTab} topic=${topic} reload=${reload} />`;
  if (tab === "partitions") return html`<${PartitionsTab} topic=${topic} />`;
  return html`<${NoPage} />`;
}

const LETTERS = { leader: "L", "in sync": "S", "catching up": "C", unknown: "?", "": "" };

/** @param {{ topic: any }} properties */
function PartitionsTab({ topic }) {
  const now = useStore(update);
  const partitions = topic.partitions;
  const nodes = now ? now.nodes.map((node) => node.node) : [...new Set(partitions.flatMap((/** @type {any} */ one) => one.replicas))].sort();
  const records = partitions.map((/** @type {any} */ one) => (one.end_offset ?? 0) - (one.first_offset ?? 0));
  const sizes = partitions.map((/** @type {any} */ one) => one.bytes ?? 0);
  const uneven = skew(records);
  return html`<dl class="numbers">
      <div><dt>Records</dt><dd>${count(records.reduce((/** @type {number} */ sum, /** @type {number} */ one) => sum + one, 0))}</dd></div>
      <div><dt>Size</dt><dd>${bytes(sizes.reduce((/** @type {number} */ sum, /** @type {number} */ one) => sum + one, 0))}</dd></div>
      <div><dt>Skew</dt><dd title="records of the largest partition over the mean">${uneven.toFixed(2)} ${uneven > 2 ? html`<${Badge} level="warning">uneven<//>` : ""}</dd></div>
      <div><dt>Retention</dt><dd>${retention(topic.configuration.retention)}</dd></div>
    </dl>
    <${Card} title="Partitions by node">
      <p class="legend"><span class="cell leader">L</span> leads <span class="cell in-sync">S</span> in sync <span class="cell catching-up">C</span> catching up <span class="cell unknown">?</span> unknown</p>
      <div class="scroll-x" tabindex="0" role="region" aria-label="Map of partitions"><table class="map">
        <thead><tr><th scope="col">Partition</th>${nodes.map((node) => html`<th scope="col">Node ${node}</th>`)}<th scope="col" class="number">Offsets</th><th scope="col" class="number">Records</th><th scope="col" class="number">Size</th><th scope="col">Share</th><th scope="col"></th></tr></thead>
        <tbody>${partitions.map((/** @type {any} */ one, /** @type {number} */ at) => html`<tr key=${one.partition_id}>
          <th scope="row">${one.partition_id}</th>
          ${nodes.map((node) => {
            const has = placement(one, /** @type {number} */ (node));
            return html`<td>${has && html`<span class=${`cell ${has.replace(" ", "-")}`}>${LETTERS[has]}<span class="hidden"> ${has}</span></span>`}</td>`;
          })}
          <td class="number">${count(one.first_offset)} – ${count(one.end_offset)}</td>
          <td class="number">${count(records[at])}</td>
          <td class="number">${bytes(one.bytes)}</td>
          <td><progress max=${Math.max(...records, 1)} value=${records[at]} aria-label=${`records of partition ${one.partition_id}`}></progress></td>
          <td><a href=${`#/cluster/explain/${encodeURIComponent(topic.topic)}/${one.partition_id}`}>explain<span class="hidden"> partition ${one.partition_id}</span></a></td>
        </tr>`)}</tbody>
      </table></div>
    <//>`;
}

/** @param {{ topic: string }} properties */
function ConsumersTab({ topic }) {
  const { value, error } = useLoaded(() => api.poll("/consumers"), [topic], 3000);
  const rows = (value?.consumers ?? []).filter((/** @type {any} */ one) => one.topics.some((/** @type {any} */ each) => each.topic === topic));
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Consumer", cell: (row) => html`<a href=${consumerLink(row)}>${row.name || row.id}</a>` },
    { title: "Kind", cell: kindOf },
    { title: "State", cell: (row) => html`<${Badge} level=${row.is_alive ? "ok" : "info"}>${row.is_alive ? "active" : "idle"}<//>` },
    { title: "Lag", isNumber: true, cell: (row) => count(row.topics.find((/** @type {any} */ each) => each.topic === topic)?.lag) },
  ];
  return html`<${ErrorNote} error=${error} /><${Table} label="Consumers of this topic" columns=${columns} rows=${rows} rowKey=${(/** @type {any} */ row) => row.id} />`;
}

/** @param {{ topic: any, reload: () => void }} properties */
function ConfigurationTab({ topic, reload }) {
  const { configuration } = topic;
  const [age, setAge] = useState(configuration.retention.ms ? `${configuration.retention.ms}ms` : "");
  const [size, setSize] = useState(configuration.retention.bytes ? `${configuration.retention.bytes}` : "");
  const [isConsumed, setIsConsumed] = useState(Boolean(configuration.retention.until_consumed));
  const [partitions, setPartitions] = useState(String(configuration.partitions));
  const path = `/topics/${encodeURIComponent(topic.topic)}`;
  const keep = async () => {
    await api.post(path, { retention: { ms: parseDuration(age) ?? undefined, bytes: parseBytes(size) ?? undefined, until_consumed: isConsumed } });
    tell("The retention was changed.");
    reload();
  };
  const grow = async () => {
    await api.post(path, { partitions: Number(partitions) });
    tell(`${topic.topic} now has ${partitions} partitions.`);
    reload();
  };
  return html`<${Card} title="Retention">
      <${Form} submit="Change retention" onSubmit=${keep}>
        <${Field} label="Keep for" value=${age} onInput=${setAge} placeholder="forever" hint="Such as 7d, 12h or 30m; empty: however old." />
        <${Field} label="Keep per partition" value=${size} onInput=${setSize} placeholder="everything" hint="Such as 10GiB; empty: however large." />
        <${Check} label="Records that every registered consumer has consumed may go" value=${isConsumed} onInput=${setIsConsumed} />
      <//>
    <//>
    <${Card} title="Partitions">
      <p>${configuration.partitions} partitions with ${configuration.replicas} replicas each${configuration.encrypted ? ", encrypted on disk" : ""}. Partitions can be added, never removed; keys are then spread differently.</p>
      <${Form} submit="Add partitions" onSubmit=${grow} isDisabled=${Number(partitions) <= configuration.partitions}>
        <${Field} label="Partitions" type="number" value=${partitions} onInput=${setPartitions} />
      <//>
    <//>`;
}

/** @param {{ topic: string, partitions: number, onClose: () => void, onDone: () => void }} properties */
function ProduceRecord({ topic, partitions, onClose, onDone }) {
  const [value, setValue] = useState("");
  const [key, setKey] = useState("");
  const [headers, setHeaders] = useState("");
  const [partition, setPartition] = useState("");
  const submit = async () => {
    const given = parseHeaders(headers);
    const done = await api.post("/producer/produce", {
      topic,
      producer_id: await findProducer(topic),
      message: value,
      ...(key ? { key } : {}),
      ...(partition ? { partition_id: Number(partition) } : {}),
      ...(Object.keys(given).length ? { headers: given } : {}),
    });
    tell(`Produced to partition ${done.partition_id} at offset ${done.offset}.`);
    onDone();
  };
  /** @type {Array<[string, string]>} */
  const choices = [["", "by key, else in turn"], ...Array.from({ length: partitions }, (_, at) => /** @type {[string, string]} */ ([String(at), String(at)]))];
  return html`<${Dialog} title=${`Produce to ${topic}`} onClose=${onClose}>
    <${Form} submit="Produce" onSubmit=${submit} onDone=${onClose} onCancel=${onClose}>
      <${Field} label="Value" isLong value=${value} onInput=${setValue} />
      <${Field} label="Key" value=${key} onInput=${setKey} placeholder="none" />
      <${Field} label="Headers" isLong value=${headers} onInput=${setHeaders} hint="One per line, as name: value." />
      <${Field} label="Partition" value=${partition} onInput=${setPartition} options=${choices} />
    <//>
  <//>`;
}
