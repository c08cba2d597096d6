export default class uPlot {
  constructor(options: unknown, data: Array<ReadonlyArray<number | null>>, parent: Element);
  setData(data: Array<ReadonlyArray<number | null>>): void;
  setSize(size: { width: number; height: number }): void;
  destroy(): void;
}
