/** Runs of pipelines that registered themselves. */

import { html, useLoaded } from "./dom.js";
import { count, duration, time } from "./format.js";
import { api } from "./state.js";
import { Badge, ErrorNote, LongTable } from "./ui.js";

const LEVELS = /** @type {Record<string, string>} */ ({ running: "info", done: "ok", passed: "ok", failed: "critical", silent: "warning" });

export function PipelinesPage() {
  const { value, error, isLoading } = useLoaded(() => api.get("/pipelines"), [], 3000);
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Run", width: "minmax(160px, 2fr)", sort: (row) => row.run, cell: (row) => row.run },
    { title: "Pipeline", width: "110px", sort: (row) => row.pipeline, cell: (row) => row.pipeline },
    { title: "Topics", width: "minmax(140px, 1fr)", cell: (row) => row.topics.join(", ") || "–" },
    { title: "State", width: "110px", sort: (row) => row.state, cell: (row) => html`<${Badge} level=${LEVELS[row.state] ?? "info"}>${row.state}<//>` },
    { title: "Records", width: "110px", isNumber: true, sort: (row) => row.records ?? null, cell: (row) => count(row.records) },
    { title: "Lag", width: "100px", isNumber: true, sort: (row) => row.lag ?? null, cell: (row) => count(row.lag) },
    { title: "Verdict", width: "minmax(140px, 2fr)", cell: (row) => row.verdict || "–" },
    { title: "Report", width: "minmax(120px, 1fr)", cell: (row) => row.report || "–" },
    { title: "Updated", width: "215px", sort: (row) => row.updated_ms, cell: (row) => html`<span title=${`started ${time(row.started_ms)}`}>${duration(Date.now() - row.updated_ms)} ago</span>` },
  ];
  return html`<h1>Pipelines</h1><p>Archive, audit and analyze runs that registered themselves, newest first.</p>
    <${ErrorNote} error=${error} />
    ${isLoading ? html`<p class="loading">Loading…</p>` : html`<${LongTable} label="Runs" columns=${columns} rows=${value?.runs ?? []} rowKey=${(/** @type {any} */ row) => row.run} sortBy=${8} isDescending empty="none has registered itself" />`}`;
}
