/** Parts that pages share: tables, lists of any length, dialogs, notes. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { Store, useStore } from "./store.js";

/** Height of a row of a long list, in pixels; the style sheet has the same. */
export const ROW_PX = 34;
/** Rows that are drawn above and below what is visible. */
const OVERSCAN = 10;
/** Time between two loads of a list; of a long one, a millisecond per row. */
const REFRESH_MS = 3000;
const REFRESH_MS_MAX = 30_000;

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => unknown} cell
 * @property {(row: any) => string | number | null} [sort] how rows are ordered by this column
 * @property {boolean} [isNumber]
 * @property {string} [width] of a long list: a share such as "2fr" or a length
 */

/** Which rows of a list are visible. Pure.
 *
 * @param {{ scrollTop: number, height: number, count: number, rowPx?: number }} view
 */
export function visibleRows({ scrollTop, height, count, rowPx = ROW_PX }) {
  const first = Math.max(0, Math.floor(scrollTop / rowPx) - OVERSCAN);
  const end = Math.min(count, Math.ceil((scrollTop + height) / rowPx) + OVERSCAN);
  return { first: Math.min(first, end), end };
}

/** How long a list that is loaded as a whole is shown before it is loaded again: one of 10,000 rows is over a MB. Pure.
 *
 * @param {number} count
 */
export function refreshMs(count) {
  return Math.min(REFRESH_MS_MAX, Math.max(REFRESH_MS, count));
}

/** Return rows in the order of a column. Pure.
 *
 * @template T
 * @param {T[]} rows
 * @param {Column | undefined} column
 * @param {boolean} isDescending
 */
export function sortRows(rows, column, isDescending) {
  if (!column?.sort) return rows;
  const key = column.sort;
  const sign = isDescending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [left, right] = [key(one), key(other)];
    if (left === right) return 0;
    if (left === null) return 1;
    if (right === null) return -1;
    return left < right ? -sign : sign;
  });
}

/**
 * @param {{ columns: Column[], rows: any[], rowKey: (row: any) => string | number, label: string, empty?: string }} properties
 */
export function Table({ columns, rows, rowKey, label, empty = "none" }) {
  if (!rows.length) return html`<p class="empty">${label}: ${empty}</p>`;
  return html`<div class="scroll-x" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.isNumber ? "number" : ""}>${column.title}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${rowKey(row)}>${columns.map((column) => html`<td class=${column.isNumber ? "number" : ""}>${column.cell(row)}</td>`)}</tr>`)}
      </tbody>
    </table>
  </div>`;
}

/**
 * A table of any length: only the rows that are visible exist.
 *
 * @param {{ columns: Column[], rows: any[], rowKey: (row: any) => string | number, label: string, height?: number, empty?: string, sortBy?: number, isDescending?: boolean, isAtEnd?: boolean }} properties
 */
export function LongTable({ columns, rows, rowKey, label, height = 560, empty = "none", sortBy = -1, isDescending = false, isAtEnd = false }) {
  const [order, setOrder] = useState({ by: sortBy, isDescending });
  const [scrollTop, setScrollTop] = useState(0);
  const body = useRef(/** @type {HTMLDivElement | null} */ (null));
  const sorted = sortRows(rows, columns[order.by], order.isDescending);
  const { first, end } = visibleRows({ scrollTop, height, count: sorted.length });
  const template = columns.map((column) => column.width ?? "1fr").join(" ");
  useLayoutEffect(() => {
    if (isAtEnd && body.current) body.current.scrollTop = body.current.scrollHeight;
  }, [isAtEnd, rows.length]);
  useLayoutEffect(() => {
    body.current?.querySelectorAll("[data-columns]").forEach((row) => {
      /** @type {HTMLElement} */ (row).style.gridTemplateColumns = template;
    });
    const head = body.current?.previousElementSibling;
    if (head instanceof HTMLElement) head.style.gridTemplateColumns = template;
    const space = body.current?.firstElementChild;
    if (space instanceof HTMLElement) space.style.height = `${sorted.length * ROW_PX}px`;
    const shown = space?.firstElementChild;
    if (shown instanceof HTMLElement) shown.style.transform = `translateY(${first * ROW_PX}px)`;
    if (body.current) body.current.style.height = `${Math.min(height, Math.max(1, sorted.length) * ROW_PX)}px`;
  });
  if (!rows.length) return html`<p class="empty">${label}: ${empty}</p>`;
  const turn = (/** @type {number} */ by) => setOrder({ by, isDescending: order.by === by ? !order.isDescending : Boolean(columns[by].isNumber) });
  return html`<div class="scroll-x"><div class="long" role="table" aria-label=${label} aria-rowcount=${sorted.length + 1}>
    <div class="long-head" role="row" aria-rowindex="1">
      ${columns.map((column, at) => html`<div role="columnheader" class=${column.isNumber ? "number" : ""} aria-sort=${order.by === at ? (order.isDescending ? "descending" : "ascending") : "none"}>
        ${column.sort ? html`<button class="sort" onClick=${() => turn(at)}>${column.title}<span aria-hidden="true">${order.by === at ? (order.isDescending ? " ▾" : " ▴") : ""}</span></button>` : column.title}
      </div>`)}
    </div>
    <div class="long-body" role="rowgroup" tabindex="0" aria-label=${`${label}: rows`} ref=${body} onScroll=${(/** @type {Event} */ event) => setScrollTop(/** @type {HTMLElement} */ (event.currentTarget).scrollTop)}>
      <div class="long-space" role="presentation"><div role="presentation">
        ${sorted.slice(first, end).map((row, at) => html`<div key=${rowKey(row)} class="long-row" role="row" aria-rowindex=${first + at + 2} data-columns>
          ${columns.map((column) => html`<div role="cell" class=${column.isNumber ? "number" : ""}>${column.cell(row)}</div>`)}
        </div>`)}
      </div></div>
    </div>
  </div></div>`;
}

/**
 * A dialog; Escape and a click on Cancel close it.
 *
 * @param {{ title: string, onClose: () => void, isWide?: boolean, children?: unknown }} properties
 */
export function Dialog({ title, onClose, isWide = false, children }) {
  const element = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    const dialog = /** @type {HTMLDialogElement} */ (element.current);
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  return html`<dialog ref=${element} class=${isWide ? "wide" : ""} aria-label=${title} onCancel=${(/** @type {Event} */ event) => { event.preventDefault(); onClose(); }}>
    <header><h2>${title}</h2><button class="quiet" onClick=${onClose} aria-label="Close">✕</button></header>
    ${children}
  </dialog>`;
}

/**
 * A form that calls something, shows its error, and tells when it is done.
 *
 * @param {{ submit: string, onSubmit: () => Promise<unknown>, onDone?: () => void, onCancel?: () => void, isDangerous?: boolean, isDisabled?: boolean, children?: unknown }} properties
 */
export function Form({ submit, onSubmit, onDone, onCancel, isDangerous = false, isDisabled = false, children }) {
  const [state, setState] = useState(/** @type {{ isBusy: boolean, error: Error | null }} */ ({ isBusy: false, error: null }));
  const run = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setState({ isBusy: true, error: null });
    try {
      await onSubmit();
    } catch (error) {
      setState({ isBusy: false, error: /** @type {Error} */ (error) });
      return;
    }
    setState({ isBusy: false, error: null });
    onDone?.();
  };
  return html`<form onSubmit=${run}>
    ${children}
    <${ErrorNote} error=${state.error} />
    <div class="buttons">
      ${onCancel && html`<button type="button" class="quiet" onClick=${onCancel}>Cancel</button>`}
      <button type="submit" class=${isDangerous ? "danger" : "primary"} disabled=${state.isBusy || isDisabled}>${state.isBusy ? "Working…" : submit}</button>
    </div>
  </form>`;
}

/**
 * A dialog for what cannot be undone, or not easily: its name must be typed.
 *
 * @param {{ title: string, name: string, warning: string, submit: string, onSubmit: () => Promise<unknown>, onClose: () => void }} properties
 */
export function TypedConfirmation({ title, name, warning, submit, onSubmit, onClose }) {
  const [typed, setTyped] = useState("");
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <${Form} submit=${submit} isDangerous onSubmit=${onSubmit} onDone=${onClose} onCancel=${onClose} isDisabled=${typed !== name}>
      <p>${warning}</p>
      <${Field} label=${`Type ${name} to confirm`} value=${typed} onInput=${setTyped} />
    <//>
  <//>`;
}

let fieldCount = 0;

/**
 * @param {{ label: string, value: string, onInput: (value: string) => void, type?: string, hint?: string, options?: Array<[string, string]>, isLong?: boolean, placeholder?: string, list?: string[] }} properties
 */
export function Field({ label, value, onInput, type = "text", hint = "", options, isLong = false, placeholder = "" }) {
  const [id] = useState(() => `field-${(fieldCount += 1)}`);
  const take = (/** @type {Event} */ event) => onInput(/** @type {HTMLInputElement} */ (event.currentTarget).value);
  const described = hint ? `${id}-hint` : undefined;
  // A browser refuses seconds in a time unless it is told to take them.
  const step = type === "datetime-local" ? "1" : undefined;
  let input = html`<input id=${id} type=${type} step=${step} value=${value} onInput=${take} placeholder=${placeholder} aria-describedby=${described} autocomplete="off" spellcheck=${false} />`;
  if (options) {
    input = html`<select id=${id} value=${value} onChange=${take} aria-describedby=${described}>
      ${options.map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}
    </select>`;
  } else if (isLong) {
    input = html`<textarea id=${id} rows="5" value=${value} onInput=${take} placeholder=${placeholder} aria-describedby=${described} spellcheck=${false}></textarea>`;
  }
  return html`<div class="field"><label for=${id}>${label}</label>${input}${hint && html`<small id=${described}>${hint}</small>`}</div>`;
}

/** @param {{ label: string, value: boolean, onInput: (value: boolean) => void }} properties */
export function Check({ label, value, onInput }) {
  return html`<label class="check"><input type="checkbox" checked=${value} onChange=${(/** @type {Event} */ event) => onInput(/** @type {HTMLInputElement} */ (event.currentTarget).checked)} /> ${label}</label>`;
}

/** @param {{ error: (Error & { outcome?: string, code?: string }) | null }} properties */
export function ErrorNote({ error }) {
  if (!error) return null;
  return html`<p class="note critical" role="alert">${error.message}${error.code ? html` <code>${error.code}</code>` : ""}</p>`;
}

/** @param {{ level: string, children?: unknown }} properties */
export function Badge({ level, children }) {
  return html`<span class=${`badge ${level}`}>${children}</span>`;
}

/** What is shown in place of a page, or of a view of one, that does not exist. */
export function NoPage() {
  return html`<p class="empty">There is nothing at this address. <a href="#/">Go to the overview.</a></p>`;
}

/** @param {{ title: string, level?: 2 | 3, actions?: unknown, children?: unknown }} properties */
export function Card({ title, actions, children }) {
  return html`<section class="card"><header><h2>${title}</h2><div class="buttons">${actions}</div></header>${children}</section>`;
}

/**
 * Save something as a file of the browser's downloads.
 *
 * @param {Blob} blob
 * @param {string} name
 */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** @type {Store<{ id: number, text: string } | null>} */
const message = new Store(/** @type {{ id: number, text: string } | null} */ (null));
let messageCount = 0;

/**
 * Say that something was done.
 *
 * @param {string} text
 */
export function tell(text) {
  const id = (messageCount += 1);
  message.set({ id, text });
  setTimeout(() => message.value?.id === id && message.set(null), 5000);
}

export function Messages() {
  const shown = useStore(message);
  return html`<div class="messages" role="status" aria-live="polite">${shown && html`<p>${shown.text}</p>`}</div>`;
}
