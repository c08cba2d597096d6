/** Runs of pipelines that registered themselves, and their reports, which are records of a topic. */

import { html, useLoaded, useState } from "./dom.js";
import { count, duration, time, toBytes } from "./format.js";
import { api } from "./state.js";
import { Badge, Dialog, ErrorNote, LongTable, save } from "./ui.js";

const REPORTS = "/topics/_pipeline_reports/records";
const LEVELS = /** @type {Record<string, string>} */ ({ running: "info", done: "ok", passed: "ok", failed: "critical", silent: "warning" });

export function PipelinesPage() {
  const { value, error, isLoading } = useLoaded(() => api.poll("/pipelines"), [], 3000);
  const [shown, setShown] = useState(/** @type {any} */ (null));
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Run", width: "minmax(160px, 2fr)", sort: (row) => row.run, cell: (row) => row.run },
    { title: "Pipeline", width: "100px", sort: (row) => row.pipeline, cell: (row) => row.pipeline },
    { title: "Topics", width: "minmax(120px, 1fr)", cell: (row) => row.topics.join(", ") || "–" },
    { title: "State", width: "100px", sort: (row) => row.state, cell: (row) => html`<${Badge} level=${LEVELS[row.state] ?? "info"}>${row.state}<//>` },
    { title: "Records", width: "110px", isNumber: true, sort: (row) => row.records ?? null, cell: (row) => count(row.records) },
    { title: "Lag", width: "100px", isNumber: true, sort: (row) => row.lag ?? null, cell: (row) => html`<span title="records that it had not done when it last reported">${count(row.lag)}</span>` },
    { title: "Verdict", width: "minmax(140px, 2fr)", cell: (row) => html`<span title=${row.verdict}>${row.verdict || "–"}</span>` },
    { title: "Report", width: "minmax(110px, 1fr)", cell: (row) => html`<${ReportCell} row=${row} onShow=${() => setShown(row)} />` },
    { title: "Updated", width: "140px", sort: (row) => row.updated_ms, cell: (row) => html`<span title=${`started ${time(row.started_ms)}`}>${duration(Date.now() - row.updated_ms)} ago</span>` },
  ];
  return html`<h1>Pipelines</h1><p>Archive, audit, analyze and other runs that registered themselves (<code>quiver pipeline … --register</code>), newest first.</p>
    <${ErrorNote} error=${error} />
    ${isLoading ? html`<p class="loading">Loading…</p>` : html`<${LongTable} label="Runs" columns=${columns} rows=${value?.runs ?? []} rowKey=${(/** @type {any} */ row) => row.run} sortBy=${8} isDescending empty="none has registered itself" />`}
    ${shown && html`<${Report} row=${shown} onClose=${() => setShown(null)} />`}`;
}

/** @param {string} path */
function nameOf(path) {
  return path.split(/[\\/]/).pop() || "report";
}

/** @param {{ row: any, onShow: () => void }} properties */
function ReportCell({ row, onShow }) {
  if (!row.report) return "–";
  // Without an offset the report is not written yet, or was too large to be copied.
  if (typeof row.report_offset !== "number") return html`<span title=${`on the machine that runs it: ${row.report}`}>${nameOf(row.report)}</span>`;
  return html`<button class="link" onClick=${onShow}>${nameOf(row.report)}<span class="hidden"> of ${row.run}</span></button>`;
}

/** A report as text. A page (HTML) is saved and opened from there: nothing that a record says is run here.
 *
 * @param {{ row: any, onClose: () => void }} properties
 */
function Report({ row, onClose }) {
  const name = nameOf(row.report);
  const isPage = /\.html?$/i.test(name);
  const load = async () => (await api.get(REPORTS, { partition_id: 0, offset: row.report_offset, max: 1 })).records.find((/** @type {any} */ one) => one.offset === row.report_offset);
  const { value, error, isLoading } = useLoaded(load, []);
  const data = () => /** @type {Uint8Array<ArrayBuffer>} */ (toBytes(value.message, value.message_b64));
  return html`<${Dialog} title=${`${name} of ${row.run}`} onClose=${onClose} isWide>
    <${ErrorNote} error=${error} />
    ${isLoading ? html`<p class="loading">Loading…</p>` : !value ? html`<p class="empty">It is no longer kept: reports are dropped after 30 days.</p>` : html`
      ${isPage ? html`<p>A page with charts. Save it, and open it from there.</p>` : html`<pre tabindex="0" aria-label="Report">${value.message ?? ""}</pre>`}
      <div class="buttons"><button class="primary" onClick=${() => save(new Blob([data()]), name)}>Save ${name}</button></div>`}
  <//>`;
}
