/** What pages are made of: preact, its hooks, and `html`, which makes elements of templates without a compiler. */

import htm from "./vendor-htm.js";
import { Component, Fragment, h, render } from "./vendor-preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor-hooks.js";

export const html = htm.bind(h);
export { Component, Fragment, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

/**
 * Return the result of a call that is repeated while the page is shown, and again when `keys` change.
 *
 * @template T
 * @param {() => Promise<T>} load
 * @param {ReadonlyArray<unknown>} keys
 * @param {number | ((value: T | null) => number)} [everyMs] 0: only once; a function is asked after each call
 * @returns {{ value: T | null, error: Error | null, reload: () => void, isLoading: boolean }}
 */
export function useLoaded(load, keys, everyMs = 0) {
  const [state, setState] = useState(/** @type {{ value: T | null, error: Error | null, isLoading: boolean }} */ ({ value: null, error: null, isLoading: true }));
  const [count, setCount] = useState(0);
  useEffect(() => {
    let isShown = true;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    // A page in the background asks nothing.
    const whenVisible = () => {
      if (document.hidden) document.addEventListener("visibilitychange", () => isShown && run(), { once: true });
      else run();
    };
    /** @type {T | null} */
    let value = null;
    const run = async () => {
      try {
        value = await load();
        if (isShown) setState({ value, error: null, isLoading: false });
      } catch (error) {
        if (isShown) setState((/** @type {{ value: T | null }} */ old) => ({ value: old.value, error: /** @type {Error} */ (error), isLoading: false }));
      }
      const pauseMs = typeof everyMs === "function" ? everyMs(value) : everyMs;
      if (isShown && pauseMs) timer = setTimeout(whenVisible, pauseMs);
    };
    run();
    return () => {
      isShown = false;
      clearTimeout(timer);
    };
  }, [...keys, count]);
  return { ...state, reload: () => setCount((/** @type {number} */ old) => old + 1) };
}
