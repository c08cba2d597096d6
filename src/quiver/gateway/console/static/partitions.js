/** How a topic's partitions are spread. Pure. */

/**
 * Return how uneven sizes are: the largest over the mean; 1 is even. Pure.
 *
 * @param {number[]} sizes
 */
export function skew(sizes) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  return total ? (Math.max(...sizes) * sizes.length) / total : 1;
}

/**
 * Return what a node has of a partition. Pure.
 *
 * @param {{ leader: number | null, replicas: number[], in_sync_replicas: number[] | null }} partition
 * @param {number} node
 * @returns {"leader" | "in sync" | "catching up" | "unknown" | ""}
 */
export function placement(partition, node) {
  if (!partition.replicas.includes(node)) return "";
  if (partition.leader === node) return "leader";
  if (!partition.in_sync_replicas) return "unknown";
  return partition.in_sync_replicas.includes(node) ? "in sync" : "catching up";
}
