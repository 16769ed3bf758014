// The extension: puts a panel on the pack's three reporting nodes and feeds it from the server's messages.

import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"
import * as graph from "./graph.js"
import { Texts } from "./i18n.js"
import { ReportStore } from "./store.js"
import { PanelView } from "./view.js"

const SOURCES = new Set(["MossFP16Loader", "MossFP16Fix"])
const REPORT_NODE = "MossFP16Report"
const MIN_HEIGHT = 260 // with the canvas' margin of 10 on each side
const FAR_ZOOM = 0.55

const store = new ReportStore()
const texts = new Texts()
const panels = new Map() // node -> PanelView
const toasted = new Set()

// ---- drawing -------------------------------------------------------------------------------------------------------

let pending = false

/** Repaints every panel in the next frame, however many messages came in before it. */
function refresh() {
  if (pending) return
  pending = true
  requestAnimationFrame(() => {
    pending = false
    for (const [node, view] of panels) paint(node, view)
  })
}

function viewOf(node) {
  const root = graph.rootGraph(app)
  const workflow = graph.workflowId(app)
  return workflow && node.graph ? store.view(workflow, graph.executionIds(root, node)) : store.view("", [])
}

function paint(node, view) {
  view.root.dataset.nodeId = node.id
  const own = viewOf(node)
  if (node.comfyClass === REPORT_NODE && (own.phase === "idle" || own.phase === "waiting")) {
    const source = graph.modelSource(node, SOURCES)
    const live = source ? viewOf(source) : null
    if (live?.phase === "running") return view.render(live, source.title)
  }
  view.render(own)
}

/** Zoomed far out, only what can be read from there is shown, larger. Cheap enough to look at a few times a second. */
function watchZoom() {
  let far = null
  setInterval(() => {
    const now = (app.canvas?.ds?.scale ?? 1) < FAR_ZOOM
    if (now === far && !pending) return
    far = now
    for (const view of panels.values()) view.root.classList.toggle("moss-far", far)
  }, 250)
}

// ---- the nodes -----------------------------------------------------------------------------------------------------

function attach(node) {
  const view = new PanelView(texts.t)
  view.root.classList.toggle("moss-far", (app.canvas?.ds?.scale ?? 1) < FAR_ZOOM)
  // hideInPanel: the side panel would show the same element, and so take it out of the node.
  const options = { serialize: false, hideOnZoom: false, hideInPanel: true, getMinHeight: () => MIN_HEIGHT, getValue: () => "" }
  const widget = node.addDOMWidget("moss_fp16_panel", "moss_fp16_panel", view.root, options)
  widget.serialize = false // not in the workflow JSON; options.serialize keeps it out of the prompt
  panels.set(node, view)
  passThrough(view.root)
  const removed = node.onRemoved
  node.onRemoved = function (...args) {
    panels.delete(node)
    view.dispose()
    return removed?.apply(this, args)
  }
  refresh()
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

function toast({ node_id: nodeId, prompt_id: promptId, kind, severity, text }) {
  if (!store.concerns(promptId, graph.workflowId(app))) return false
  const once = `${promptId}\u0000${nodeId}\u0000${kind}`
  if (typeof text !== "string" || toasted.has(once)) return false
  toasted.add(once)
  if (toasted.size > 500) toasted.delete(toasted.values().next().value)
  const known = ["info", "warn", "error"].includes(severity) ? severity : "info"
  const life = known === "info" ? 6000 : 12_000
  app.extensionManager?.toast?.add({ severity: known, summary: texts.t("toast.title"), detail: text, life })
  return false
}

// Registered while the module loads: the page reports messages of a type that nobody listens to as errors.
listen("moss_fp16.report", (detail) => store.receive({ ...detail, live: true }))
listen("moss_fp16.notice", toast)
listen("execution_start", startRun)
listen("execution_cached", ({ prompt_id: id, nodes }) => store.runCached(id, nodes))
listen("executed", onExecuted)
listen("execution_success", ({ prompt_id: id }) => store.runEnded(id, "done"))
listen("execution_error", (detail) => store.runEnded(detail.prompt_id, "failed", detail.exception_message?.trim()))
listen("execution_interrupted", ({ prompt_id: id }) => store.runEnded(id, "interrupted"))
listen("reconnected", restore)

// ---- texts and styles ----------------------------------------------------------------------------------------------

function setLocale() {
  texts.locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? document.documentElement.lang
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
    watchZoom()
    await loadTexts()
  },
  nodeCreated(node) {
    if (SOURCES.has(node.comfyClass) || node.comfyClass === REPORT_NODE) attach(node)
  },
  loadedGraphNode: refresh,
  afterConfigureGraph: graphChanged,
})
