/** A value that pages watch. */

import { useEffect, useState } from "./dom.js";

/** @template T */
export class Store {
  /** @param {T} value */
  constructor(value) {
    this.value = value;
    /** @type {Set<(value: T) => void>} */
    this.watchers = new Set();
  }

  /** @param {T} value */
  set(value) {
    this.value = value;
    for (const watcher of this.watchers) watcher(value);
  }

  /** @param {(value: T) => void} watcher */
  watch(watcher) {
    this.watchers.add(watcher);
    return () => void this.watchers.delete(watcher);
  }
}

/**
 * Return the value of a store, and show the page again when it changes.
 *
 * @template T
 * @param {Store<T>} store
 * @returns {T}
 */
export function useStore(store) {
  const [value, setValue] = useState(store.value);
  useEffect(() => {
    setValue(store.value);
    return store.watch(setValue);
  }, [store]);
  return value;
}
