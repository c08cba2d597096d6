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
