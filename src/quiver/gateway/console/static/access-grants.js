/** Grants, quotas, and the answer to who may do what. */

import { KINDS, LIMITS, VERBS, grantKey, grantText, limitTexts, resourceText } from "./access.js";
import { withQuery } from "./api.js";
import { html, useLoaded, useState } from "./dom.js";
import { parseBytes, time } from "./format.js";
import { api } from "./state.js";
import { Badge, Card, Check, Dialog, ErrorNote, Field, Form, LongTable, Table, TypedConfirmation, tell } from "./ui.js";

/** @typedef {import("./access.js").Grant} Grant */

/** @param {string[]} values */
function choices(values) {
  return values.map((one) => /** @type {[string, string]} */ ([one, one]));
}

/**
 * Grants with what adds and removes them.
 *
 * @param {{ title: string, grants: Grant[], subject?: string, onChange: () => void, isLong?: boolean }} properties `subject`: whose the next one is
 */
export function GrantTable({ title, grants, subject = "", onChange, isLong = false }) {
  const [isAdding, setIsAdding] = useState(false);
  const [removed, setRemoved] = useState(/** @type {Grant | null} */ (null));
  const remove = async () => {
    const { name, is_prefix: isPrefix, ...rest } = /** @type {Grant} */ (removed);
    await api.remove(withQuery("/acls", { ...rest, name, ...(isPrefix ? { is_prefix: true } : {}) }));
    tell("The grant was removed.");
    onChange();
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Subject", width: "minmax(160px, 1fr)", sort: (row) => row.subject, cell: (row) => html`<${SubjectLink} subject=${row.subject} />` },
    { title: "May", width: "120px", sort: (row) => VERBS.indexOf(row.verb), cell: (row) => html`<${Badge} level=${row.verb === "admin" ? "warning" : "info"}>${row.verb}<//>` },
    { title: "On", width: "minmax(200px, 2fr)", sort: resourceText, cell: resourceText },
    { title: "Actions", width: "120px", cell: (row) => html`<button class="danger-text" onClick=${() => setRemoved(row)}>Remove<span class="hidden"> grant: ${grantText(row)}</span></button>` },
  ];
  const shown = { columns, rows: grants, rowKey: grantKey, label: "Grants", empty: "none: what no grant allows is denied" };
  return html`<${Card} title=${title} actions=${html`<button onClick=${() => setIsAdding(true)}>Add grant</button>`}>
      ${isLong ? html`<${LongTable} ...${shown} sortBy=${0} />` : html`<${Table} ...${shown} />`}
    <//>
    ${isAdding && html`<${AddGrant} subject=${subject} onClose=${() => setIsAdding(false)} onDone=${onChange} />`}
    ${removed && html`<${TypedConfirmation} title="Remove grant" name=${removed.subject} submit="Remove" warning=${`${grantText(removed)}: this ends at once.`} onSubmit=${remove} onClose=${() => setRemoved(null)} />`}`;
}

/** @param {{ subject: string }} properties */
export function SubjectLink({ subject }) {
  if (!subject.startsWith("user:")) return html`<span>${subject}</span>`;
  return html`<a href=${`#/access/users/${encodeURIComponent(subject.slice(5))}`}>${subject}</a>`;
}

/** @param {{ subject: string, onClose: () => void, onDone: () => void }} properties */
function AddGrant({ subject: given, onClose, onDone }) {
  const [subject, setSubject] = useState(given);
  const [verb, setVerb] = useState("read");
  const [kind, setKind] = useState("topic");
  const [name, setName] = useState("");
  const [isPrefix, setIsPrefix] = useState(false);
  const isCluster = kind === "cluster";
  const grant = { subject, verb, kind, name: isCluster ? "" : name, is_prefix: !isCluster && isPrefix };
  const submit = async () => {
    await api.post("/acls", grant);
    tell(`${grantText(grant)}.`);
    onDone();
  };
  return html`<${Dialog} title="Add grant" onClose=${onClose}>
    <${Form} submit="Add" onSubmit=${submit} onDone=${onClose} onCancel=${onClose} isDisabled=${!subject || (!isCluster && !isPrefix && !name)}>
      <${Field} label="Subject" value=${subject} onInput=${setSubject} hint="user:NAME, role:NAME or anonymous." />
      <${Field} label="May" value=${verb} onInput=${setVerb} options=${choices(VERBS)} />
      <${Field} label="On" value=${kind} onInput=${setKind} options=${choices(KINDS)} />
      ${!isCluster && html`<${Field} label="Name" value=${name} onInput=${setName} /><${Check} label="All names that begin with it" value=${isPrefix} onInput=${setIsPrefix} />`}
      <p class=${`note ${isCluster && verb === "admin" ? "warning" : "info"}`}>${isCluster && verb === "admin" ? `${subject || "…"} may do everything.` : `${grantText({ ...grant, subject: subject || "…", name: grant.name || (isPrefix ? "" : "…") })}.`}</p>
    <//>
  <//>`;
}

/** @param {{ principal: string }} properties */
export function TestTab({ principal: given }) {
  const [principal, setPrincipal] = useState(given);
  const [verb, setVerb] = useState("read");
  const [kind, setKind] = useState("topic");
  const [name, setName] = useState("");
  const [verdict, setVerdict] = useState(/** @type {{ asked: string, is_allowed: boolean, reason: string } | null} */ (null));
  const change = (/** @type {(value: string) => void} */ setter) => (/** @type {string} */ value) => {
    setter(value);
    setVerdict(null);
  };
  const resource = { kind, name: kind === "cluster" ? "" : name };
  const test = async () => {
    const found = await api.get("/acls/test", { principal, verb, ...resource });
    setVerdict({ asked: `${principal} ${found.is_allowed ? "may" : "may not"} ${verb} ${resourceText(resource)}`, ...found });
  };
  return html`<${Card} title="Who may do what">
    <p>The verdict of the cluster now, and the grant or the rule that decides it. Nothing is done.</p>
    <${Form} submit="Test" onSubmit=${test} isDisabled=${!principal || (kind !== "cluster" && !name)}>
      <${Field} label="User" value=${principal} onInput=${change(setPrincipal)} hint="The name of a user, or anonymous." />
      <${Field} label="Wants to" value=${verb} onInput=${change(setVerb)} options=${choices(VERBS)} />
      <${Field} label="On" value=${kind} onInput=${change(setKind)} options=${choices(KINDS)} />
      ${kind !== "cluster" && html`<${Field} label="Name" value=${name} onInput=${change(setName)} />`}
    <//>
    <div role="status">${verdict && html`<p class=${`note verdict ${verdict.is_allowed ? "ok" : "critical"}`}><b>${verdict.asked}</b>: ${verdict.reason}</p>`}</div>
  <//>`;
}

export function QuotasTab() {
  const { value, error, reload } = useLoaded(() => api.get("/quotas"), [], 5000);
  const [dialog, setDialog] = useState(/** @type {{ kind: string, subject: string, limits: any } | null} */ (null));
  const close = () => setDialog(null);
  const remove = async () => {
    await api.remove(withQuery("/quotas", { subject: dialog?.subject }));
    tell(`${dialog?.subject} has no quota of its own any more.`);
    reload();
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Subject", cell: (row) => html`<${SubjectLink} subject=${row.subject} />` },
    { title: "Limits", cell: (row) => limitTexts(row.limits).join("; ") || "–" },
    { title: "Changed", cell: (row) => time(row.changed_ms) },
    {
      title: "Actions",
      cell: (row) => html`<span class="buttons"><button onClick=${() => setDialog({ kind: "set", ...row })}>Change<span class="hidden"> quota of ${row.subject}</span></button>
        <button class="danger-text" onClick=${() => setDialog({ kind: "remove", ...row })}>Remove<span class="hidden"> quota of ${row.subject}</span></button></span>`,
    },
  ];
  return html`<${Card} title="Quotas" actions=${html`<button onClick=${() => setDialog({ kind: "set", subject: "", limits: {} })}>Set quota</button>`}>
      <p>Each limit is found by itself: the user's own, else the highest of its roles, else that of <code>default</code>, else the settings of the node.</p>
      <${ErrorNote} error=${error} />
      ${value && html`<${Table} label="Quotas" columns=${columns} rows=${value.quotas} rowKey=${(/** @type {any} */ row) => row.subject} empty="none: the settings of the nodes apply" />`}
    <//>
    ${dialog?.kind === "set" && html`<${SetQuota} subject=${dialog.subject} limits=${dialog.limits} onClose=${close} onDone=${reload} />`}
    ${dialog?.kind === "remove" && html`<${TypedConfirmation} title="Remove quota" name=${dialog.subject} submit="Remove" warning=${`All limits that are set for ${dialog.subject} end at once; those of its roles, of default and of the nodes apply.`} onSubmit=${remove} onClose=${close} />`}`;
}

/** @param {{ subject: string, limits: Record<string, number>, onClose: () => void, onDone: () => void }} properties */
function SetQuota({ subject: given, limits, onClose, onDone }) {
  const [subject, setSubject] = useState(given);
  const [texts, setTexts] = useState(/** @type {Record<string, string>} */ (Object.fromEntries(LIMITS.map(({ name }) => [name, limits[name] === undefined || limits[name] === null ? "" : String(limits[name])]))));
  const submit = async () => {
    const set = LIMITS.filter(({ name }) => texts[name].trim()).map(({ name, isBytes }) => [name, isBytes ? parseBytes(texts[name]) : Number(texts[name])]);
    await api.post("/quotas", { subject, ...Object.fromEntries(set) });
    tell(`The quota of ${subject} was set.`);
    onDone();
  };
  return html`<${Dialog} title="Set quota" onClose=${onClose}>
    <${Form} submit="Set" onSubmit=${submit} onDone=${onClose} onCancel=${onClose} isDisabled=${!subject || !Object.values(texts).some((text) => text.trim())}>
      <${Field} label="Subject" value=${subject} onInput=${setSubject} hint="user:NAME, role:NAME, anonymous, default, topic:NAME or topic:*." />
      <p>0 is no limit. What is left empty stays as it is.</p>
      <div class="pairs">${LIMITS.map(({ name, label, isBytes }) => html`<${Field} key=${name} label=${label} value=${texts[name]} onInput=${(/** @type {string} */ text) => setTexts({ ...texts, [name]: text })} type=${isBytes ? "text" : "number"} placeholder=${isBytes ? "such as 10MiB" : ""} />`)}</div>
    <//>
  <//>`;
}
