/** The part of the page's address after the #, which says what is shown. */

/**
 * Return its parts; one that is not well-formed is taken as it stands. Pure.
 *
 * @param {string} hash
 * @returns {string[]}
 */
export function parseRoute(hash) {
  return hash.replace(/^#\/?/, "").split("/").map(decode);
}

/** @param {string} part */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * Return the address of the page of a group or work queue. Pure.
 *
 * @param {string} name
 */
export function groupLink(name) {
  return `#/consumers/group/${encodeURIComponent(name)}`;
}

/**
 * Return the address of the page of a consumer; the cursors of a group belong to the group's page. Pure.
 *
 * @param {{ id: number, name?: string, group_kind?: string | null }} consumer
 */
export function consumerLink({ id, name, group_kind: kind }) {
  return kind && name ? groupLink(name) : `#/consumers/consumer/${id}`;
}
