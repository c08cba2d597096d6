export function useState<T>(first: T | (() => T)): [T, (next: T | ((old: T) => T)) => void];
export function useEffect(effect: () => void | (() => void), inputs?: ReadonlyArray<unknown>): void;
export function useLayoutEffect(effect: () => void | (() => void), inputs?: ReadonlyArray<unknown>): void;
export function useRef<T>(first: T): { current: T };
export function useMemo<T>(make: () => T, inputs: ReadonlyArray<unknown>): T;
export function useCallback<T>(callback: T, inputs: ReadonlyArray<unknown>): T;
