/** Records of a topic: by offset, time or key, searched, followed live, as text, JSON or bytes, and as files. */

import { html, useEffect, useMemo, useState } from "./dom.js";
import { withQuery } from "./api.js";
import { RecordReader, WrittenNumber, parseJson, toQuery } from "./browse.js";
import { bytes, count, hexDump, time, toBytes } from "./format.js";
import { api } from "./state.js";
import { Badge, Check, ErrorNote, Field, LongTable, save } from "./ui.js";

const FOLLOW_MS = 1000;
/** How often a partition that does not end is read on before the page is drawn again. */
const FOLLOW_TURNS_MAX = 10;
/** Most records in a file: as many as the API returns at once. */
const FILE_MAX = 10_000;
/** @typedef {import("./browse.js").Shown} Shown */
/** @typedef {import("./browse.js").Range} Range */

/** Characters of a value in the list. */
const PREVIEW = 200;

/** @param {Shown} record */
function preview(record) {
  if (record.message_b64 !== undefined) return `${bytes(toBytes(null, record.message_b64).length)} of bytes`;
  if (record.message === null || record.message === undefined) return "null";
  return record.message.slice(0, PREVIEW);
}

/** @param {{ topic: string, partitions: number }} properties */
export function RecordsTab({ topic, partitions }) {
  const [form, setForm] = useState({ partition: "", start: "latest", at: "", key: "", search: "", max: "100" });
  const [{ records, ranges, behind }, setShown] = useState({ records: /** @type {Shown[]} */ ([]), ranges: /** @type {Range[]} */ ([]), behind: 0 });
  const [state, setState] = useState({ isBusy: false, error: /** @type {Error | null} */ (null), scanned: 0 });
  const [isFollowing, setIsFollowing] = useState(false);
  const [chosen, setChosen] = useState(/** @type {Shown | null} */ (null));
  const [format, setFormat] = useState("jsonl");
  const path = `/topics/${encodeURIComponent(topic)}/records`;
  const reader = useMemo(() => new RecordReader((query) => api.get(path, query)), [path]);
  const set = (/** @type {string} */ name) => (/** @type {string} */ value) => setForm((/** @type {any} */ old) => ({ ...old, [name]: value }));

  const show = () => setShown({ records: reader.records, ranges: reader.ranges, behind: reader.behind });
  const read = async () => {
    setState({ isBusy: true, error: null, scanned: 0 });
    try {
      const scanned = await reader.look(form);
      if (scanned === null) return;
      show();
      setState({ isBusy: false, error: null, scanned });
    } catch (error) {
      setState({ isBusy: false, error: /** @type {Error} */ (error), scanned: 0 });
    }
  };
  const readOn = async (/** @type {number} */ turnsMax) => {
    try {
      await reader.readOn(turnsMax);
    } finally {
      show();
    }
  };
  useEffect(() => void read(), [topic]);
  useEffect(() => {
    if (!isFollowing) return undefined;
    let isShown = true;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const turn = async () => {
      try {
        if (!document.hidden) await readOn(FOLLOW_TURNS_MAX);
        if (isShown) setState((/** @type {any} */ old) => ({ ...old, error: null }));
      } catch (error) {
        if (isShown) setState((/** @type {any} */ old) => ({ ...old, error }));
      }
      if (isShown) timer = setTimeout(turn, FOLLOW_MS);
    };
    turn();
    return () => {
      isShown = false;
      clearTimeout(timer);
    };
  }, [isFollowing, reader]);
  const download = async () => {
    try {
      const response = await api.send("GET", withQuery(path, { ...toQuery({ ...form, max: String(FILE_MAX) }), format }));
      save(await response.blob(), `${topic}.${format}`);
    } catch (error) {
      setState({ isBusy: false, error: /** @type {Error} */ (error), scanned: 0 });
    }
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = useMemo(() => [
    { title: "Time", width: "215px", cell: (row) => time(row.timestamp) },
    { title: "Partition", width: "80px", isNumber: true, cell: (row) => row.partition_id },
    { title: "Offset", width: "110px", isNumber: true, cell: (row) => html`<button class="link" aria-label=${`Show record ${row.partition_id}/${row.offset}`} onClick=${() => setChosen(row)}>${row.offset}</button>` },
    { title: "Key", width: "minmax(80px, 1fr)", cell: (row) => row.key ?? (row.key_b64 ? `${row.key_b64} (base64)` : "–") },
    { title: "Value", width: "minmax(200px, 4fr)", cell: (row) => html`<span class="value">${preview(row)}</span>` },
  ], []);
  /** @type {Array<[string, string]>} */
  const choices = [["", "all"], ...Array.from({ length: partitions }, (_, at) => /** @type {[string, string]} */ ([String(at), String(at)]))];
  return html`<form class="filters" onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); read(); }}>
      <${Field} label="Partition" value=${form.partition} onInput=${set("partition")} options=${choices} />
      <${Field} label="From" value=${form.start} onInput=${set("start")} options=${[["latest", "the newest"], ["earliest", "the oldest"], ["offset", "offset"], ["time", "time"]]} />
      ${form.start === "offset" && html`<${Field} label="Offset" type="number" value=${form.at} onInput=${set("at")} />`}
      ${form.start === "time" && html`<${Field} label="Time" type="datetime-local" value=${form.at} onInput=${set("at")} />`}
      <${Field} label="Key" value=${form.key} onInput=${set("key")} placeholder="any" />
      <${Field} label="Search" type="search" value=${form.search} onInput=${set("search")} placeholder="text in value or key" />
      <${Field} label="At most" value=${form.max} onInput=${set("max")} options=${[["100", "100"], ["1000", "1,000"], ["10000", "10,000"]]} />
      <div class="buttons"><button type="submit" class="primary" disabled=${state.isBusy}>${state.isBusy ? "Reading…" : "Read"}</button></div>
    </form>
    <div class="filters">
      <${Check} label="Follow live" value=${isFollowing} onInput=${setIsFollowing} />
      <p role="status">${count(records.length)} records${form.search || form.key ? `, ${count(state.scanned)} looked at` : ""}${isFollowing && behind ? `, ${count(behind)} behind the end` : ""}</p>
      ${behind > 0 && !isFollowing && html`<button onClick=${() => readOn(1).catch((error) => setState({ isBusy: false, error, scanned: 0 }))}>Read on</button>`}
      <${Field} label="Download as" value=${format} onInput=${setFormat} options=${[["jsonl", "JSON lines"], ["csv", "CSV"], ["arrow", "Arrow"], ["parquet", "Parquet"]]} />
      <div class="buttons"><button onClick=${download} aria-describedby="download-limit">Download</button></div>
      <p id="download-limit">up to ${count(FILE_MAX)} records, whatever “At most” says</p>
    </div>
    <${ErrorNote} error=${state.error} />
    ${ranges.filter((range) => range.error).map((range) => html`<p class="note warning">Partition ${range.partition_id}: ${range.error}</p>`)}
    <${LongTable} label="Records" columns=${columns} rows=${records} rowKey=${(/** @type {Shown} */ row) => `${row.partition_id}/${row.offset}`} height=${420} isAtEnd=${isFollowing} />
    ${chosen && html`<${RecordDetail} key=${`${chosen.partition_id}/${chosen.offset}`} record=${chosen} onClose=${() => setChosen(null)} />`}`;
}

/** @param {{ record: Shown, onClose: () => void }} properties */
function RecordDetail({ record, onClose }) {
  const parsed = useMemo(() => parseJson(record.message), [record]);
  const isTree = parsed !== null && !parsed.rounded;
  const [view, setView] = useState(isTree ? "json" : record.message_b64 === undefined ? "text" : "hex");
  const data = useMemo(() => toBytes(record.message, record.message_b64), [record]);
  const headers = Object.entries({ ...record.headers, ...record.headers_b64 });
  return html`<section class="card detail" aria-label=${`Record ${record.partition_id}/${record.offset}`}>
    <header><h2>Partition ${record.partition_id}, offset ${record.offset}</h2><div class="buttons">
      ${[["text", "Text"], ["json", "JSON"], ["hex", "Bytes"]].map(([name, title]) => html`<button class="quiet" aria-pressed=${view === name} disabled=${name === "json" && !isTree} onClick=${() => setView(name)}>${title}</button>`)}
      <button class="quiet" onClick=${onClose} aria-label="Close the record">✕</button>
    </div></header>
    <dl class="facts"><dt>Time</dt><dd>${time(record.timestamp)}</dd><dt>Key</dt><dd>${record.key ?? record.key_b64 ?? "–"}</dd><dt>Size</dt><dd>${bytes(data.length)}</dd>
      ${headers.map(([name, value]) => html`<dt>${name}</dt><dd>${value ?? "null"}</dd>`)}</dl>
    ${parsed?.rounded && html`<p class="note info">It is JSON, and shown as text: this browser would round its number ${parsed.rounded}.</p>`}
    ${view === "json" && isTree && html`<div class="json"><${JsonTree} value=${parsed.value} name="" depth=${0} /></div>`}
    ${view === "text" && html`<pre tabindex="0">${record.message ?? (record.message_b64 === undefined ? "null" : new TextDecoder().decode(data))}</pre>`}
    ${view === "hex" && html`<pre tabindex="0">${hexDump(data)}</pre>`}
  </section>`;
}

/** @param {{ value: unknown, name: string, depth: number }} properties */
function JsonTree({ value, name, depth }) {
  const label = name ? html`<b>${name}</b>: ` : "";
  if (value instanceof WrittenNumber) return html`<div>${label}<${Badge} level="plain">${value.text}<//></div>`;
  if (value === null || typeof value !== "object") return html`<div>${label}<${Badge} level="plain">${JSON.stringify(value)}<//></div>`;
  const entries = Object.entries(value);
  const isList = Array.isArray(value);
  return html`<details open=${depth < 2}>
    <summary>${label}${isList ? `[${entries.length}]` : `{${entries.length}}`}</summary>
    ${entries.slice(0, 500).map(([key, each]) => html`<${JsonTree} key=${key} value=${each} name=${key} depth=${depth + 1} />`)}
    ${entries.length > 500 && html`<p>… ${entries.length - 500} more</p>`}
  </details>`;
}
