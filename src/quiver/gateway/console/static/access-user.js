/** One user: tokens, roles, grants. A new token's secret is in the memory of its dialog, and forgotten with it. */

import { expiry, grantsOf, isTokenOf } from "./access.js";
import { GrantTable } from "./access-grants.js";
import { html, useState } from "./dom.js";
import { parseDuration, time } from "./format.js";
import { api, session } from "./state.js";
import { useStore } from "./store.js";
import { Badge, Card, Dialog, Field, Form, LongTable, Table, TypedConfirmation, tell } from "./ui.js";

/** @typedef {import("./access.js").Token} Token */

/**
 * @param {{ user: any, grants: import("./access.js").Grant[], roles: any[], onChange: () => void }} properties
 */
export function UserPage({ user, grants, roles, onChange }) {
  const [dialog, setDialog] = useState(/** @type {{ kind: string, role?: string } | null} */ (null));
  const who = useStore(session);
  const close = () => setDialog(null);
  const path = `/users/${encodeURIComponent(user.user)}`;
  const isOwn = who.principal === `user:${user.user}`;
  const act = async (/** @type {() => Promise<unknown>} */ call, /** @type {string} */ said) => {
    await call();
    tell(said);
    onChange();
  };
  const remove = async () => {
    await act(() => api.remove(path), `User ${user.user} was deleted.`);
    location.hash = "#/access";
  };
  return html`<nav class="crumbs" aria-label="Where"><a href="#/access">Users</a> / </nav>
    <div class="title"><h2 class="name">${user.user} <${UserState} user=${user} /></h2><div class="buttons">
      <button class="quiet" onClick=${() => setDialog({ kind: "password" })}>Set password</button>
      <button class="quiet" onClick=${() => setDialog({ kind: "enable" })}>${user.is_enabled ? "Disable user" : "Enable user"}</button>
      <button class="quiet danger-text" onClick=${() => setDialog({ kind: "delete" })}>Delete user</button>
    </div></div>
    ${isOwn && html`<p class="note warning">You are this user: what you take from it, you take from yourself.</p>`}
    <dl class="facts"><dt>Created</dt><dd>${time(user.created_ms)}</dd><dt>Password</dt><dd>${user.has_password ? "yes, for the wire protocol" : "none: tokens only"}</dd></dl>
    <${Card} title="Tokens" actions=${html`<button onClick=${() => setDialog({ kind: "token" })}>Create token</button>`}>
      <${TokenTable} tokens=${user.tokens} onChange=${onChange} isShort />
      <p class="empty">A user has two tokens at most, so that one can be replaced while the other is in use.</p>
    <//>
    <${Card} title="Roles" actions=${html`<button onClick=${() => setDialog({ kind: "role" })}>Give a role</button>`}>
      ${user.roles.length ? html`<ul class="plain">${user.roles.map((/** @type {string} */ role) => html`<li><${Badge} level=${role === "admin" ? "warning" : "info"}>${role}<//> <button class="danger-text" onClick=${() => setDialog({ kind: "unrole", role })}>Take away<span class="hidden"> role ${role}</span></button></li>`)}</ul>` : html`<p class="empty">Roles: none</p>`}
    <//>
    <${GrantTable} title="Grants, its own and by its roles" grants=${grantsOf(grants, user)} subject=${`user:${user.user}`} onChange=${onChange} />
    <p><a href=${`#/access/test/${encodeURIComponent(user.user)}`}>Test what ${user.user} may do</a></p>
    ${dialog?.kind === "token" && html`<${CreateToken} user=${user.user} onClose=${close} onDone=${onChange} />`}
    ${dialog?.kind === "password" && html`<${SetPassword} path=${path} onClose=${close} onDone=${() => { tell(`The password of ${user.user} was set.`); onChange(); }} />`}
    ${dialog?.kind === "role" && html`<${GiveRole} user=${user} roles=${roles} onClose=${close} onDone=${onChange} />`}
    ${dialog?.kind === "unrole" && html`<${TypedConfirmation} title=${`Take role ${dialog.role} from ${user.user}`} name=${user.user} submit="Take away" warning=${`${user.user} loses at once what only the role ${dialog.role} allows.`} onSubmit=${() => act(() => api.remove(`/roles/${encodeURIComponent(dialog.role ?? "")}/users/${encodeURIComponent(user.user)}`), `${user.user} no longer has the role ${dialog.role}.`)} onClose=${close} />`}
    ${dialog?.kind === "enable" && html`<${Dialog} title=${user.is_enabled ? "Disable user" : "Enable user"} onClose=${close}>
      <${Form} submit=${user.is_enabled ? "Disable" : "Enable"} isDangerous=${user.is_enabled} onCancel=${close} onDone=${close} onSubmit=${() => act(() => api.post(path, { is_enabled: !user.is_enabled }), `User ${user.user} was ${user.is_enabled ? "disabled" : "enabled"}.`)}>
        <p>${user.is_enabled ? `${user.user} can no longer log in, and open connections are refused; tokens, roles and grants stay.` : `${user.user} can log in again.`}</p>
      <//>
    <//>`}
    ${dialog?.kind === "delete" && html`<${TypedConfirmation} title="Delete user" name=${user.user} submit="Delete" warning="Its tokens, roles and grants are deleted with it; what it produced stays." onSubmit=${remove} onClose=${close} />`}`;
}

/** @param {{ user: any }} properties */
export function UserState({ user }) {
  return user.is_enabled ? html`<${Badge} level="ok">enabled<//>` : html`<${Badge} level="warning">disabled<//>`;
}

/**
 * Tokens by id and expiry; never a secret.
 *
 * @param {{ tokens: Token[], onChange: () => void, isShort?: boolean }} properties
 */
export function TokenTable({ tokens, onChange, isShort = false }) {
  const [revoked, setRevoked] = useState(/** @type {Token | null} */ (null));
  const close = () => setRevoked(null);
  const revoke = async () => {
    await api.remove(`/tokens/${revoked?.token_id}`);
    tell("The token was revoked.");
    onChange();
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Token", width: "minmax(180px, 1fr)", sort: (row) => row.token_id, cell: (row) => html`<code>${row.token_id}</code>${isTokenOf(row, api.token) ? html` <${Badge} level="info">in use here<//>` : ""}` },
    ...(isShort ? [] : [/** @type {import("./ui.js").Column} */ ({ title: "User", width: "minmax(140px, 1fr)", sort: (row) => row.user, cell: (row) => html`<a href=${`#/access/users/${encodeURIComponent(row.user)}`}>${row.user}</a>` })]),
    { title: "Created", width: "215px", sort: (row) => row.created_ms, cell: (row) => time(row.created_ms) },
    { title: "Expires", width: "300px", sort: (row) => row.expires_ms ?? Number.MAX_SAFE_INTEGER, cell: (row) => html`<${Expiry} expires=${row.expires_ms} />` },
    { title: "Actions", width: "110px", cell: (row) => html`<button class="danger-text" onClick=${() => setRevoked(row)}>Revoke<span class="hidden"> ${row.token_id}</span></button>` },
  ];
  const shown = { columns, rows: tokens, rowKey: (/** @type {Token} */ row) => row.token_id, label: "Tokens" };
  return html`${isShort ? html`<${Table} ...${shown} />` : html`<${LongTable} ...${shown} sortBy=${3} />`}
    ${revoked && html`<${TypedConfirmation} title=${`Revoke a token of ${revoked.user}`} name=${revoked.token_id} submit="Revoke" warning=${isTokenOf(revoked, api.token) ? "You are logged in with this token: the console asks for another one." : "Whoever uses it is refused at once."} onSubmit=${revoke} onClose=${close} />`}`;
}

/** @param {{ expires: number | null }} properties */
function Expiry({ expires }) {
  const { level, text } = expiry(expires, Date.now());
  return html`${expires === null ? "" : `${time(expires)} `}${text || level === "warning" ? html`<${Badge} level=${level}>${text || "soon"}<//>` : ""}`;
}

/** @param {{ user: string, onClose: () => void, onDone: () => void }} properties */
function CreateToken({ user, onClose, onDone }) {
  const [lasting, setLasting] = useState("90d");
  const [made, setMade] = useState(/** @type {{ token: string, token_id: string, expires_ms: number | null } | null} */ (null));
  const submit = async () => {
    const ms = parseDuration(lasting);
    setMade(await api.post("/tokens", { user, ...(ms === null ? {} : { lasting_ms: ms }) }));
    onDone();
  };
  if (made) return html`<${NewToken} user=${user} made=${made} onClose=${onClose} />`;
  return html`<${Dialog} title=${`Create a token of ${user}`} onClose=${onClose}>
    <${Form} submit="Create" onSubmit=${submit} onCancel=${onClose}>
      <${Field} label="Valid for" value=${lasting} onInput=${setLasting} placeholder="for ever" hint="Such as 90d or 12h; empty: it does not expire." />
    <//>
  <//>`;
}

/** @param {{ user: string, made: { token: string, token_id: string, expires_ms: number | null }, onClose: () => void }} properties */
function NewToken({ user, made, onClose }) {
  return html`<${Dialog} title=${`The new token of ${user}`} onClose=${onClose}>
    <p class="note warning">This is the only time that it is shown: the cluster keeps a hash of it. Copy it now.</p>
    <pre tabindex="0" aria-label="Token" data-secret>${made.token}</pre>
    <p>${made.expires_ms === null ? "It does not expire." : `It is valid until ${time(made.expires_ms)}.`}</p>
    <div class="buttons">
      ${window.navigator.clipboard && html`<button onClick=${async () => { await window.navigator.clipboard.writeText(made.token); tell("The token was copied."); }}>Copy</button>`}
      <button class="primary" onClick=${onClose}>I have it</button>
    </div>
  <//>`;
}

/** @param {{ path: string, onClose: () => void, onDone: () => void }} properties */
function SetPassword({ path, onClose, onDone }) {
  const [password, setPassword] = useState("");
  return html`<${Dialog} title="Set password" onClose=${onClose}>
    <${Form} submit="Set" onSubmit=${() => api.post(path, { password })} onDone=${() => { onDone(); onClose(); }} onCancel=${onClose} isDisabled=${!password}>
      <${Field} label="Password" type="password" value=${password} onInput=${setPassword} hint="For logins by SCRAM on the wire protocol; the cluster keeps a verifier, never the password." />
    <//>
  <//>`;
}

/** @param {{ user: any, roles: any[], onClose: () => void, onDone: () => void }} properties */
function GiveRole({ user, roles, onClose, onDone }) {
  const others = roles.map((row) => row.role).filter((role) => !user.roles.includes(role));
  const [role, setRole] = useState(others.find((one) => one !== "admin") ?? others[0] ?? "");
  const submit = async () => {
    await api.post(`/roles/${encodeURIComponent(role)}/users/${encodeURIComponent(user.user)}`);
    tell(`${user.user} has the role ${role}.`);
    onDone();
  };
  return html`<${Dialog} title=${`Give ${user.user} a role`} onClose=${onClose}>
    <${Form} submit="Give" onSubmit=${submit} onDone=${onClose} onCancel=${onClose} isDisabled=${!role}>
      <${Field} label="Role" value=${role} onInput=${setRole} options=${others.map((one) => [one, one])} />
      ${role === "admin" && html`<p class="note warning">The role admin may do everything.</p>`}
    <//>
  <//>`;
}
