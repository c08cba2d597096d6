/** The rules of ESLint that find mistakes; layout is a matter of taste. */
const BROWSER = ["AbortController", "AbortSignal", "Blob", "Date", "Element", "Event", "HTMLElement", "Map", "ResizeObserver", "Response", "TextDecoder", "TextEncoder", "URL", "URLSearchParams", "Uint8Array", "atob", "clearTimeout", "document", "fetch", "getComputedStyle", "localStorage", "location", "matchMedia", "setTimeout", "window"];
const NODE = ["TextEncoder", "globalThis", "process", "setTimeout", "URL", "Response", "DOMException"];

export default [
  { ignores: ["node_modules/**"] },
  {
    files: ["**/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: Object.fromEntries([...BROWSER, ...NODE].map((name) => [name, "readonly"])) },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      "consistent-return": "error",
      curly: ["error", "multi-line"],
      "dot-notation": "error",
      eqeqeq: "error",
      "no-console": "error",
      "no-dupe-keys": "error",
      "no-duplicate-imports": "error",
      "no-empty": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-param-reassign": "error",
      "no-promise-executor-return": "off",
      "no-self-compare": "error",
      "no-shadow": "error",
      "no-undef": "error",
      "no-unreachable": "error",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
      "prefer-template": "error",
      "require-await": "off",
      "no-restricted-properties": ["error", { property: "innerHTML", message: "records are shown as text only" }, { property: "outerHTML" }, { property: "insertAdjacentHTML" }],
      "no-restricted-syntax": ["error", { selector: "Identifier[name='dangerouslySetInnerHTML']", message: "records are shown as text only" }],
    },
  },
];
