/** The console: its frame, the menu, and which page is shown. */

import { insecureText } from "./access.js";
import { html, render, useEffect, useState } from "./dom.js";
import { AccessPage } from "./page-access.js";
import { ClusterPage } from "./page-cluster.js";
import { ConsumersPage } from "./page-consumers.js";
import { OverviewPage } from "./page-overview.js";
import { PipelinesPage } from "./page-pipelines.js";
import { TopicPage } from "./page-topic.js";
import { TopicsPage } from "./page-topics.js";
import { parseRoute } from "./route.js";
import { begin, login, logout, place, session, streamError, update } from "./state.js";
import { useStore } from "./store.js";
import { Field, Form, Messages, NoPage } from "./ui.js";

const MENU = [["", "Overview"], ["topics", "Topics"], ["consumers", "Consumers"], ["cluster", "Cluster"], ["access", "Access"], ["pipelines", "Pipelines"]];
const THEME_KEY = "quiver-theme";

function App() {
  const [route, setRoute] = useState(parseRoute(location.hash));
  const who = useStore(session);
  useEffect(() => {
    const turn = () => {
      setRoute(parseRoute(location.hash));
      document.getElementById("page")?.focus();
    };
    window.addEventListener("hashchange", turn);
    begin();
    return () => window.removeEventListener("hashchange", turn);
  }, []);
  useEffect(() => {
    document.title = `${MENU.find(([path]) => path === route[0])?.[1] ?? "Quiver"}${route[1] ? ` · ${route[1]}` : ""} · Quiver`;
  }, [route]);
  if (who.state === "needed") return html`<${Login} error=${who.error} />`;
  return html`
    <a class="skip" href="#page" onClick=${(/** @type {Event} */ event) => { event.preventDefault(); document.getElementById("page")?.focus(); }}>Skip to the page</a>
    <${Header} route=${route} />
    <${PlaceNote} />
    <${InsecureNote} />
    <main id="page" tabindex="-1">${who.state === "unknown" ? html`<p class="loading">Connecting…</p>` : html`<${Page} route=${route} />`}</main>
    <${Messages} />
  `;
}

/** @param {{ route: string[] }} properties */
function Page({ route }) {
  const [name, first, second] = route;
  if (name === "") return html`<${OverviewPage} />`;
  if (name === "topics" && first) return html`<${TopicPage} key=${first} topic=${first} tab=${second || "partitions"} />`;
  if (name === "topics") return html`<${TopicsPage} />`;
  if (name === "consumers") return html`<${ConsumersPage} kind=${first ?? ""} name=${second ?? ""} />`;
  if (name === "cluster") return html`<${ClusterPage} tab=${first || "nodes"} about=${route.slice(2)} />`;
  if (name === "access") return html`<${AccessPage} tab=${first || "users"} name=${second ?? ""} />`;
  if (name === "pipelines") return html`<${PipelinesPage} />`;
  return html`<h1>There is no such page</h1><${NoPage} />`;
}

/** @param {{ route: string[] }} properties */
function Header({ route }) {
  const now = useStore(update);
  const who = useStore(session);
  return html`<header class="top">
    <a class="brand" href="#/" aria-label="Quiver"><img src="/console/icon.svg" alt="" width="24" height="24" /> <span>Quiver</span></a>
    <nav aria-label="Pages"><ul>
      ${MENU.map(([path, title]) => html`<li><a href=${`#/${path}`} aria-current=${route[0] === path ? "page" : undefined}>${title}</a></li>`)}
    </ul></nav>
    <div class="where">
      ${now && html`<a href="#/" class=${`health-dot ${now.health.level}`} title=${now.health.sentence}><span aria-hidden="true">●</span> ${now.cluster_id}</a>`}
      ${who.state === "known" && html`<span>${who.principal}</span> <button class="quiet" onClick=${logout}>Log out</button>`}
      <${ThemeButton} />
    </div>
  </header>`;
}

function ThemeButton() {
  const [theme, setTheme] = useState(localStorage.getItem(THEME_KEY) ?? "");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    if (theme) localStorage.setItem(THEME_KEY, theme);
  }, [theme]);
  const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return html`<button class="quiet" onClick=${() => setTheme(isDark ? "light" : "dark")} aria-label=${isDark ? "Use the light theme" : "Use the dark theme"}>${isDark ? "☀" : "☾"}</button>`;
}

/** Says where the page is connected, when it is not where it came from. */
function PlaceNote() {
  const now = useStore(place);
  const error = useStore(streamError);
  if (now.state === "connected" && !now.note) {
    if (!error) return null;
    return html`<p class="note warning place" role="status">No live updates: ${error.message}</p>`;
  }
  const level = now.state === "connected" ? "warning" : "critical";
  return html`<p class=${`note ${level} place`} role="alert" data-place=${now.state}>${now.note}</p>`;
}

/** Says on every page which nodes gave up their protection. */
function InsecureNote() {
  const text = insecureText(useStore(update)?.nodes ?? []);
  return text ? html`<p class="note warning place" role="note">${text}</p>` : null;
}

/** @param {{ error: string }} properties */
function Login({ error }) {
  const [token, setToken] = useState("");
  return html`<main class="login" id="page">
    <h1><img src="/console/icon.svg" alt="" width="32" height="32" /> Quiver</h1>
    <p>This cluster knows its users. The token stays in this tab until it is closed.</p>
    ${error && html`<p class="note critical" role="alert">${error}</p>`}
    <${Form} submit="Log in" onSubmit=${() => login(token.trim())} isDisabled=${!token.trim()}>
      <${Field} label="Token" type="password" value=${token} onInput=${setToken} hint="An administrator creates one with quiver token create." />
    <//>
  </main>`;
}

document.documentElement.dataset.theme = localStorage.getItem(THEME_KEY) ?? "";
const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.replaceChildren();
render(html`<${App} />`, root);
