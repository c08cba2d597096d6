/** A chart of time series that is drawn again with every update. */

import { html, useEffect, useRef } from "./dom.js";
import { HISTORY_MS } from "./history.js";
import uPlot from "./vendor-uplot.js";

/** Colours of lines, by name of a property of the style sheet: they differ in light and dark. */
const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

/** @param {string} property */
function colour(property) {
  return getComputedStyle(document.documentElement).getPropertyValue(property).trim() || "#888";
}

/** Distances between the lines of a scale of bytes: powers of two, so that labels are whole. */
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** The same for a scale of things that are counted: there are no halves of them. */
const COUNT_STEPS = Array.from({ length: 36 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

/** Width of the labels of a scale, in pixels: "1000.0 KiB/s" fits. */
const SCALE_PX = 86;

/**
 * @typedef {{ name: string, label: string }} Line
 * @param {{ title: string, columns: import("./history.js").Columns, lines: Line[], format: (value: number | null) => string, version: unknown, least?: number, isBytes?: boolean, isCount?: boolean }} properties `least` is the least upper end of the scale
 */
export function Chart({ title, columns, lines, format, version, least = 1, isBytes = false, isCount = false }) {
  const holder = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const steps = isBytes ? BYTE_STEPS : isCount ? COUNT_STEPS : null;
  const shape = lines.map((line) => line.label).join("\n");
  useEffect(() => {
    const element = /** @type {HTMLDivElement} */ (holder.current);
    plot.current = new uPlot(makeOptions(element, lines, format, least, steps), makeData(columns, lines), element);
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: 150 }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setData(makeData(columns, lines));
  }, [version, shape]);
  const now = lines.map((line) => ({ ...line, text: format(columns.last(line.name)) }));
  return html`<figure class="chart">
    <figcaption>
      <h3>${title}</h3>
      <ul>${now.map((line, at) => html`<li key=${line.label}><span class=${`swatch swatch-${at + 1}`} aria-hidden="true"></span>${line.label} <b>${line.text}</b></li>`)}</ul>
    </figcaption>
    <div class="plot" ref=${holder} role="img" aria-label=${`${title}, last 15 minutes; now ${now.map((line) => `${line.label} ${line.text}`).join(", ")}`}></div>
  </figure>`;
}

/**
 * @param {import("./history.js").Columns} columns
 * @param {Line[]} lines
 */
function makeData(columns, lines) {
  return [columns.times, ...lines.map((line) => columns.column(line.name))];
}

/**
 * @param {HTMLElement} element
 * @param {Line[]} lines
 * @param {(value: number | null) => string} format
 * @param {number} least
 * @param {number[] | null} steps
 */
function makeOptions(element, lines, format, least, steps) {
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width: Math.max(200, element.clientWidth),
    height: 150,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: {
      x: { time: true, range: (/** @type {unknown} */ _, /** @type {number | null} */ first, /** @type {number | null} */ last) => [(last ?? Date.now() / 1000) - HISTORY_MS / 1000, last ?? Date.now() / 1000] },
      y: { range: (/** @type {unknown} */ _, /** @type {number | null} */ low, /** @type {number | null} */ high) => [0, Math.max(high ?? 0, least) * 1.1] },
    },
    axes: [
      { ...axis, size: 24, values: (/** @type {unknown} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => new Date(tick * 1000).toTimeString().slice(0, 5)) },
      { ...axis, size: SCALE_PX, ...(steps ? { incrs: steps } : {}), values: (/** @type {unknown} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => format(tick)) },
    ],
    series: [{}, ...lines.map((line, at) => ({ label: line.label, stroke: () => colour(COLOURS[at % COLOURS.length]), width: 1.5, points: { show: false }, spanGaps: true }))],
  };
}
