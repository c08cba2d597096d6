/** Who may do what: users and their tokens, roles, grants, quotas. For administrators. */

import { OPEN_TEXTS } from "./access.js";
import { GrantTable, QuotasTab, TestTab } from "./access-grants.js";
import { TokenTable, UserPage, UserState } from "./access-user.js";
import { html, useLoaded, useState } from "./dom.js";
import { count, time } from "./format.js";
import { api, update } from "./state.js";
import { useStore } from "./store.js";
import { Badge, Card, Dialog, ErrorNote, Field, Form, LongTable, NoPage, Table, TypedConfirmation, tell } from "./ui.js";

const TABS = [["users", "Users"], ["tokens", "Tokens"], ["roles", "Roles"], ["grants", "Grants"], ["quotas", "Quotas"], ["test", "Test access"]];
const REFRESH_MS = 5000;

/** @param {{ tab: string, name: string }} properties */
export function AccessPage({ tab, name }) {
  const now = useStore(update);
  return html`<h1>Access</h1>
    ${now && OPEN_TEXTS[now.security_mode] && html`<p class=${`note ${now.security_mode === "insecure" ? "warning" : "info"}`}>${OPEN_TEXTS[now.security_mode]}</p>`}
    <nav class="tabs" aria-label="Views of access"><ul>
      ${TABS.map(([path, title]) => html`<li><a href=${`#/access/${path}`} aria-current=${tab === path ? "page" : undefined}>${title}</a></li>`)}
    </ul></nav>
    ${!TABS.some(([path]) => path === tab) && html`<${NoPage} />`}
    ${tab === "test" ? html`<${TestTab} key=${name} principal=${name} />` : tab === "quotas" ? html`<${QuotasTab} />` : html`<${Accounts} tab=${tab} name=${name} />`}`;
}

/** Everything about users in one answer each: they are few calls, and the views are joined.
 *
 * @param {{ tab: string, name: string }} properties
 */
function Accounts({ tab, name }) {
  const load = async () => {
    const [users, roles, grants] = await Promise.all([api.get("/users"), api.get("/roles"), api.get("/acls")]);
    return { users: users.users, roles: roles.roles, grants: grants.grants };
  };
  const { value, error, reload, isLoading } = useLoaded(load, [], REFRESH_MS);
  if (isLoading) return html`<p class="loading">Loading…</p>`;
  if (!value) return html`<${ErrorNote} error=${error} />`;
  const user = tab === "users" && name ? value.users.find((/** @type {any} */ one) => one.user === name) : null;
  return html`<${ErrorNote} error=${error} />
    ${tab === "users" && !name && html`<${UsersTab} users=${value.users} onChange=${reload} />`}
    ${tab === "users" && name && (user ? html`<${UserPage} key=${name} user=${user} grants=${value.grants} roles=${value.roles} onChange=${reload} />` : html`<p class="empty">There is no user ${name}. <a href="#/access">All users</a></p>`)}
    ${tab === "tokens" && html`<${Card} title="Tokens of all users"><${TokenTable} tokens=${value.users.flatMap((/** @type {any} */ one) => one.tokens)} onChange=${reload} /><//>`}
    ${tab === "roles" && html`<${RolesTab} roles=${value.roles} grants=${value.grants} onChange=${reload} />`}
    ${tab === "grants" && html`<${GrantTable} title="Grants" grants=${value.grants} onChange=${reload} isLong />`}`;
}

/** @param {{ users: any[], onChange: () => void }} properties */
function UsersTab({ users, onChange }) {
  const [filter, setFilter] = useState("");
  const [isCreating, setIsCreating] = useState(false);
  const rows = users.filter((row) => `${row.user} ${row.roles.join(" ")}`.toLowerCase().includes(filter.toLowerCase()));
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "User", width: "minmax(160px, 2fr)", sort: (row) => row.user, cell: (row) => html`<a href=${`#/access/users/${encodeURIComponent(row.user)}`}>${row.user}</a>` },
    { title: "State", width: "100px", sort: (row) => (row.is_enabled ? 0 : 1), cell: (row) => html`<${UserState} user=${row} />` },
    { title: "Roles", width: "minmax(140px, 2fr)", cell: (row) => row.roles.map((/** @type {string} */ role) => html`<${Badge} level=${role === "admin" ? "warning" : "info"}>${role}<//> `) },
    { title: "Tokens", width: "90px", isNumber: true, sort: (row) => row.tokens.length, cell: (row) => count(row.tokens.length) },
    { title: "Password", width: "100px", sort: (row) => (row.has_password ? 0 : 1), cell: (row) => (row.has_password ? "yes" : "–") },
    { title: "Created", width: "215px", sort: (row) => row.created_ms, cell: (row) => time(row.created_ms) },
  ];
  return html`<${Card} title="Users" actions=${html`<button class="primary" onClick=${() => setIsCreating(true)}>Create user</button>`}>
      <div class="filters"><${Field} label="Filter" type="search" value=${filter} onInput=${setFilter} placeholder="name or role" /><p role="status">${count(rows.length)} of ${count(users.length)} users</p></div>
      <${LongTable} label="Users" columns=${columns} rows=${rows} rowKey=${(/** @type {any} */ row) => row.user} sortBy=${0} />
    <//>
    ${isCreating && html`<${CreateUser} onClose=${() => setIsCreating(false)} onDone=${onChange} />`}`;
}

/** @param {{ onClose: () => void, onDone: () => void }} properties */
function CreateUser({ onClose, onDone }) {
  const [user, setUser] = useState("");
  const [password, setPassword] = useState("");
  const submit = async () => {
    await api.post("/users", { user, ...(password ? { password } : {}) });
    tell(`User ${user} was created. It may do nothing yet: give it a role or a grant.`);
    onDone();
    location.hash = `#/access/users/${encodeURIComponent(user)}`;
  };
  return html`<${Dialog} title="Create user" onClose=${onClose}>
    <${Form} submit="Create" onSubmit=${submit} onDone=${onClose} onCancel=${onClose} isDisabled=${!user}>
      <${Field} label="Name" value=${user} onInput=${setUser} hint="Letters, digits, dots, underscores, @ and hyphens." />
      <${Field} label="Password" type="password" value=${password} onInput=${setPassword} hint="For logins by SCRAM on the wire protocol; empty: tokens only." />
    <//>
  <//>`;
}

/** @param {{ roles: any[], grants: import("./access.js").Grant[], onChange: () => void }} properties */
function RolesTab({ roles, grants, onChange }) {
  const [dialog, setDialog] = useState(/** @type {{ kind: string, role: string } | null} */ (null));
  const [name, setName] = useState("");
  const close = () => setDialog(null);
  const act = async (/** @type {() => Promise<unknown>} */ call, /** @type {string} */ said) => {
    await call();
    tell(said);
    onChange();
  };
  /** @type {import("./ui.js").Column[]} */
  const columns = [
    { title: "Role", cell: (row) => html`<b>${row.role}</b>` },
    { title: "Users", cell: (row) => row.users.map((/** @type {string} */ user, /** @type {number} */ at) => html`${at ? ", " : ""}<a href=${`#/access/users/${encodeURIComponent(user)}`}>${user}</a>`) },
    { title: "Grants", cell: (row) => (row.role === "admin" ? "everything" : count(grants.filter((grant) => grant.subject === `role:${row.role}`).length)) },
    { title: "Actions", cell: (row) => (row.role === "admin" ? "always there" : html`<button class="danger-text" onClick=${() => setDialog({ kind: "delete", role: row.role })}>Delete<span class="hidden"> role ${row.role}</span></button>`) },
  ];
  return html`<${Card} title="Roles" actions=${html`<button onClick=${() => setDialog({ kind: "create", role: "" })}>Create role</button>`}>
      <p>A user gets a role on its own page; what a role may do is said by the grants of <code>role:NAME</code>.</p>
      <${Table} label="Roles" columns=${columns} rows=${roles} rowKey=${(/** @type {any} */ row) => row.role} />
    <//>
    ${dialog?.kind === "create" && html`<${Dialog} title="Create role" onClose=${close}>
      <${Form} submit="Create" onSubmit=${() => act(() => api.post("/roles", { role: name }), `Role ${name} was created.`)} onDone=${() => { setName(""); close(); }} onCancel=${close} isDisabled=${!name}><${Field} label="Name" value=${name} onInput=${setName} /><//>
    <//>`}
    ${dialog?.kind === "delete" && html`<${TypedConfirmation} title="Delete role" name=${dialog.role} submit="Delete" warning="Its users lose what only the role allows, and its grants are deleted." onSubmit=${() => act(() => api.remove(`/roles/${encodeURIComponent(dialog.role)}`), `Role ${dialog.role} was deleted.`)} onClose=${close} />`}`;
}
