// The extension: puts a panel on the pack's three reporting nodes and feeds it from the server's messages.

import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"
import * as graph from "./graph.js"
import { Texts } from "./i18n.js"
import { AdvancedInputs, setHints } from "./inputs.js"
import { ReportStore } from "./store.js"
import { Toasts, onPage } from "./toasts.js"
import { PanelView } from "./view.js"

const SOURCES = new Set(["MossFP16Loader", "MossFP16Fix"])
const REPORT_NODE = "MossFP16Report"
const HEIGHT = 320 // with the canvas' margin of 10 on each side
const SMALL_HEIGHT = 190
const BUTTON_HEIGHT = 30 // of the button for the advanced inputs
const FAR_ZOOM = 0.55
const LOOK_EVERY = 250 // ms

const store = new ReportStore()
const texts = new Texts()
const panels = new Map() // node on a graph -> {view, inputs}
const toasts = new Toasts(texts, onPage(() => app.extensionManager?.toast))

// ---- drawing -------------------------------------------------------------------------------------------------------

let pending = false

/** Repaints every panel in the next frame, however many messages came in before it. */
function refresh() {
  if (pending) return
  pending = true
  requestAnimationFrame(() => {
    pending = false
    paintAll()
  })
}

/** A node that left its graph has no panel any more, and a panel that cannot be painted keeps no other from it. */
function paintAll() {
  const reporters = reportersOf()
  for (const [node, panel] of [...panels]) {
    if (!node.graph) drop(node)
    else guarded(node, () => paint(node, panel, reporters), (error) => panel.view.fail(texts.t("note.broken", { error })))
  }
}

const said = new Set()

/** What `act` gives; where it throws that is logged once, and `otherwise` is called. */
function guarded(node, act, otherwise = () => {}) {
  try {
    return act()
  } catch (error) {
    const what = `${node.comfyClass}: ${error}`
    if (!said.has(what)) console.error("[MOSS FP16] A panel could not be painted:", error)
    said.add(what)
    otherwise(error)
    return undefined
  }
}

/** source node -> the report nodes that show its runs. */
function reportersOf() {
  const root = graph.rootGraph(app)
  const found = new Map()
  for (const node of panels.keys()) {
    if (node.comfyClass !== REPORT_NODE || !node.graph || graph.aside(node)) continue
    const source = guarded(node, () => graph.modelSource(root, node, SOURCES))
    if (source) found.set(source, [...(found.get(source) ?? []), node])
  }
  return found
}

function viewOf(node) {
  const root = graph.rootGraph(app)
  const workflow = graph.workflowId(app)
  return workflow && node.graph ? store.view(workflow, graph.executionIds(root, node)) : store.view("", [])
}

/** Whose report a node shows: its own; where it has none, that of the node its runs go through or end in. */
function shownOf(node, reporters) {
  const own = viewOf(node)
  const has = own.report || own.refusal
  if (node.comfyClass === REPORT_NODE) {
    const source = graph.modelSource(graph.rootGraph(app), node, SOURCES)
    const other = source ? viewOf(source) : null
    const newer = other?.promptId !== own.promptId && other?.order > own.order // a run that was queued elsewhere
    if (other?.report && (!has || newer)) return { view: other, from: source.title, live: other.phase === "running" }
  } else if (!has) {
    const ids = graph.executionIds(graph.rootGraph(app), node)
    for (const reporter of reporters.get(node) ?? []) {
      const other = viewOf(reporter)
      if (other.report && ids.includes(other.report.nodeId)) return { view: other, from: reporter.title }
    }
  }
  return { view: own }
}

function paint(node, { view, inputs }, reporters) {
  view.root.dataset.nodeId = node.id
  const { view: found, from = "", live = false } = shownOf(node, reporters)
  const aside = graph.aside(node)
  const shown = { ...found, aside, reporter: node.comfyClass === REPORT_NODE, errorNode: failedElsewhere(node, found) }
  view.render(shown, {
    from,
    live,
    reported: reporters.has(node),
    remedy: remedyOf(node, shown),
    advanced: advancedOf(inputs),
  })
}

/** The title of the node that failed, where it is another one. */
function failedElsewhere(node, { errorNode }) {
  const root = graph.rootGraph(app)
  if (!errorNode || graph.executionIds(root, node).includes(String(errorNode))) return ""
  return graph.nodeOf(root, errorNode)?.title ?? ""
}

/** What changes from outside without a message is looked at a few times a second: zoom, mute, links, a widget's value. */
function watch() {
  let before = ""
  setInterval(() => {
    const far = (app.canvas?.ds?.scale ?? 1) < FAR_ZOOM
    for (const { view } of panels.values()) view.root.classList.toggle("moss-far", far)
    const now = [...panels].map(([node, panel]) => signature(node, panel)).join()
    if (now !== before) refresh()
    before = now
  }, LOOK_EVERY)
}

function signature(node, { inputs }) {
  return guarded(node, () => {
    inputs.settle()
    inputs.showFault(app.lastNodeErrors?.[node.id]?.errors)
    const source = node.comfyClass === REPORT_NODE ? graph.modelSource(graph.rootGraph(app), node, SOURCES) : node
    const fix = source?.widgets?.find((widget) => widget.name === "fix")?.value
    const { changed } = inputs.counts()
    return [node.id, node.mode, Boolean(node.graph), source?.id, source?.title, fix, inputs.open, changed, vueNodes()].join(":")
  })
}

const vueNodes = () => globalThis.LiteGraph?.vueNodesMode === true

// ---- the remedy ----------------------------------------------------------------------------------------------------

/** The node that a report's remedy is about: the one that made the report. */
function sourceOf(node, report) {
  const found = report?.nodeId ? graph.nodeOf(graph.rootGraph(app), report.nodeId) : null
  if (found && SOURCES.has(found.comfyClass)) return found
  return SOURCES.has(node.comfyClass) ? node : graph.modelSource(graph.rootGraph(app), node, SOURCES)
}

const linked = (node, name) => node.inputs?.some((input) => input.widget?.name === name && input.link != null) === true

/** What to do, in words, and the button that does it: {text, button, title}. */
function remedyOf(node, { report }) {
  const remedy = report?.remedy
  if (!remedy) return null
  const text = texts.say(remedy)
  const { source, widget } = targetOf(node, report)
  if (!widget) return { text }
  const values = { ...remedy.action, node: source.title }
  if (widget.value === remedy.action.value) return { text: texts.t("button.isSet", values) }
  return { text, button: texts.t("button.set", values), title: texts.t("button.setOn", values) }
}

/** The widget that a remedy sets; none where the value comes in by a link. */
function targetOf(node, report) {
  const action = report?.remedy?.action
  const source = action ? sourceOf(node, report) : null
  const widget = source?.widgets?.find((candidate) => candidate.name === action.input)
  return { source, widget: widget && !linked(source, action.input) ? widget : null }
}

/** Sets the widget as a hand would: one step that undo takes back. */
function applyRemedy(node) {
  const { report } = shownOf(node, reportersOf()).view
  const { source, widget } = targetOf(node, report)
  if (!widget) return
  const { value } = report.remedy.action
  app.canvas?.emitBeforeChange?.()
  try {
    widget.value = value
    widget.callback?.(value, app.canvas, source)
  } finally {
    app.canvas?.emitAfterChange?.()
  }
  source.setDirtyCanvas?.(true, true)
  refresh()
}

/** The button over the panel that shows the advanced inputs; Nodes 2.0 has one of its own. */
function advancedOf(inputs) {
  const { all, changed } = inputs.counts()
  const always = app.extensionManager?.setting?.get("Comfy.Node.AlwaysShowAdvancedWidgets") === true
  if (vueNodes() || all === 0 || always) return null
  const key = inputs.open ? "button.basic" : changed > 0 ? "button.advancedChanged" : "button.advanced"
  return { words: texts.t(key, { n: all, changed }), open: inputs.open }
}

// ---- the nodes -----------------------------------------------------------------------------------------------------

function attach(node) {
  const inputs = new AdvancedInputs(node)
  const act = (what) => (what === "remedy" ? applyRemedy(node) : (inputs.toggle(), refresh()))
  const view = new PanelView(texts, act)
  view.root.classList.toggle("moss-far", (app.canvas?.ds?.scale ?? 1) < FAR_ZOOM)
  // A workflow that is being loaded has its links later than its nodes: until the first paint nothing is grown.
  const getMinHeight = () => (view.small || !view.shown ? SMALL_HEIGHT : HEIGHT) + (view.advanced.hidden ? 0 : BUTTON_HEIGHT)
  // hideInPanel: the side panel would show the same element, and so take it out of the node.
  const options = { serialize: false, hideOnZoom: false, hideInPanel: true, getMinHeight, getValue: () => "" }
  const widget = node.addDOMWidget("moss_fp16_panel", "moss_fp16_panel", view.root, options)
  widget.serialize = false // not in the workflow JSON; options.serialize keeps it out of the prompt
  passThrough(view.root)
  const panel = { view, inputs }
  follow(node, "onAdded", () => enter(node, panel))
  follow(node, "onRemoved", () => drop(node))
  if (node.graph) enter(node, panel)
}

/** Calls `then` after whatever the node's own callback does. */
function follow(node, name, then) {
  const own = node[name]
  node[name] = function (...args) {
    const result = own?.apply(this, args)
    then()
    return result
  }
}

/** Only nodes on a graph have a panel: those that were made to be copied, or taken off, have none. */
function enter(node, panel) {
  panels.set(node, panel)
  panel.inputs.settle()
  setHints(node, texts.t)
  panel.view.observe()
  refresh()
}

function drop(node) {
  panels.get(node)?.view.dispose()
  panels.delete(node)
}

/** In the classic canvas the wheel and the middle button over the panel still zoom and pan. */
function passThrough(element) {
  const canvas = () => (globalThis.LiteGraph?.vueNodesMode ? null : app.canvas)
  element.addEventListener(
    "wheel",
    (event) => {
      const scroller = event.target.closest?.(".moss-table, .moss-panel")
      const scrolls = scroller && scroller.scrollHeight > scroller.clientHeight + 1
      if (scrolls && !event.ctrlKey) return event.stopPropagation()
      if (!canvas()) return
      event.preventDefault()
      canvas().processMouseWheel(event)
    },
    { passive: false },
  )
  element.addEventListener("pointerdown", (event) => event.button === 1 && canvas()?.processMouseDown(event))
  element.addEventListener("pointermove", (event) => event.buttons & 4 && canvas()?.processMouseMove(event))
  element.addEventListener("pointerup", (event) => event.button === 1 && canvas()?.processMouseUp(event))
}

// ---- the server's messages -----------------------------------------------------------------------------------------

const changed = (did) => did !== false && refresh()
const listen = (name, handle) => api.addEventListener(name, (event) => changed(handle(event.detail ?? {})))

async function getJson(route) {
  const response = await api.fetchApi(route)
  if (!response.ok) throw new Error(`${route}: ${response.status}`)
  return response.json()
}

/** Which workflow a run belongs to is the server's to say; an older server cannot, then it is the one on screen. */
async function resolveRun(promptId) {
  let workflow = graph.workflowId(app)
  try {
    workflow = (await getJson(`/jobs/${encodeURIComponent(promptId)}`)).workflow_id ?? null
  } catch {
    // No such route, or the run is over already.
  }
  store.runBelongsTo(promptId, workflow)
  refresh()
}

function startRun({ prompt_id: promptId }) {
  if (typeof promptId !== "string") return
  store.runStarted(promptId)
  resolveRun(promptId)
}

function onExecuted({ node, output, prompt_id: promptId }) {
  const report = output?.moss_fp16_report?.[0]
  return report ? store.receive({ node_id: String(node), prompt_id: promptId, state: report.state, report }) : false
}

/** After a reload or a reconnect: the workflow's last report per node, and whether a run of it is under way. */
async function restore() {
  const workflow = graph.workflowId(app)
  if (!workflow) return
  try {
    const entries = await getJson(`/moss_fp16/reports?workflow_id=${encodeURIComponent(workflow)}`)
    const running = await runningJobs()
    for (const entry of Object.values(entries)) store.receive({ ...entry, live: true })
    for (const job of running ?? []) {
      store.runStarted(job.id)
      store.runBelongsTo(job.id, job.workflow_id)
    }
    if (running) await endMissedRuns(new Set(running.map((job) => job.id)))
  } catch (error) {
    console.warn("[MOSS FP16] The last reports could not be read:", error)
  }
  refresh()
}

let restored = null

/** Another workflow came on screen: its reports may be older than this page. */
function graphChanged() {
  const workflow = graph.workflowId(app)
  if (workflow !== restored && panels.size > 0) {
    restored = workflow
    restore()
  }
  refresh()
}

const OUTCOMES = { completed: "done", failed: "failed", cancelled: "interrupted" }

/** Runs whose end this page did not hear of. */
async function endMissedRuns(running) {
  for (const promptId of store.openRuns().filter((id) => !running.has(id))) {
    const job = await getJson(`/jobs/${encodeURIComponent(promptId)}`).catch(() => ({ status: "cancelled" }))
    if (job.status in OUTCOMES) store.runEnded(promptId, OUTCOMES[job.status])
  }
  store.endOrphans(running)
}

async function runningJobs() {
  try {
    const { jobs } = await getJson("/jobs?status=in_progress&limit=20")
    return Array.isArray(jobs) ? jobs : null
  } catch {
    return null
  }
}

function onNotice(notice) {
  if (store.concerns(notice.prompt_id, graph.workflowId(app))) toasts.notice(notice)
  return false
}

/** Which workflows have a run waiting in the queue. */
async function lookAtQueue() {
  try {
    const { jobs } = await getJson("/jobs?status=pending&limit=50")
    store.setQueued((Array.isArray(jobs) ? jobs : []).map((job) => job.workflow_id).filter((id) => id))
  } catch {
    store.setQueued([]) // an older server cannot say
  }
  refresh()
}

// Registered while the module loads: the page reports messages of a type that nobody listens to as errors.
listen("moss_fp16.report", (detail) => store.receive({ ...detail, live: true }))
listen("moss_fp16.notice", onNotice)
listen("execution_start", startRun)
listen("execution_cached", ({ prompt_id: id, nodes }) => store.runCached(id, nodes))
listen("executed", onExecuted)
listen("execution_success", ({ prompt_id: id }) => store.runEnded(id, "done"))
listen("execution_error", (detail) => {
  store.runEnded(detail.prompt_id, "failed", String(detail.exception_message ?? "").trim(), detail.node_id ?? null)
})
listen("execution_interrupted", ({ prompt_id: id }) => store.runEnded(id, "interrupted"))
listen("reconnected", () => (restore(), lookAtQueue(), false))
listen("promptQueued", () => (lookAtQueue(), false))
listen("status", () => (panels.size > 0 && lookAtQueue(), false))

// ---- texts and styles ----------------------------------------------------------------------------------------------

function setLocale() {
  texts.locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? document.documentElement.lang
  for (const node of panels.keys()) setHints(node, texts.t)
  refresh()
}

async function loadTexts() {
  try {
    texts.load(await getJson("/i18n"))
  } catch {
    // The English texts are built in.
  }
  setLocale()
}

function loadStyle() {
  const link = document.createElement("link")
  link.rel = "stylesheet"
  link.href = new URL("./panel.css", import.meta.url).href
  document.head.append(link)
}

app.registerExtension({
  name: "moss.fp16.panel",
  init: loadStyle,
  async setup() {
    app.ui?.settings?.addEventListener?.("Comfy.Locale.change", setLocale)
    watch()
    await loadTexts()
  },
  nodeCreated(node) {
    if (SOURCES.has(node.comfyClass) || node.comfyClass === REPORT_NODE) attach(node)
  },
  loadedGraphNode: refresh,
  afterConfigureGraph: graphChanged,
})
