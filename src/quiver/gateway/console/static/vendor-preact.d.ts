/** What the console uses of preact, as far as a template without types can be checked. */
export type VNode = object;
export function h(type: unknown, properties: unknown, ...children: unknown[]): VNode;
export function render(tree: unknown, parent: Element): void;
export class Component<P = unknown, S = unknown> {
  props: P;
  state: S;
  setState(state: Partial<S>): void;
}
export const Fragment: unknown;
